//! Open files of one view. Directories are never open: the kernel lists them by their nodes.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;

use super::location::NodeIndex;
use crate::ids::LayerId;
use crate::layer_stack::LayerPath;
use crate::lazy_copy_up::PartialCopy;
use crate::quota::FileAccount;
use crate::rooted_dir::Result;
use crate::vfs::{BackingFiles, BackingId};

/// An open file description.
#[derive(Debug)]
struct Open {
    node: NodeIndex,
    file: Arc<OwnedFd>,
    writable: bool,
    /// Whether it is opened for execution.
    executed: bool,
    /// The account of the file, if the branch has a disk limit.
    file_use: Option<Arc<FileAccount>>,
    /// The partial copy, if the file is one.
    partial: Option<Arc<PartialCopy>>,
}

/// A file that the kernel reads and writes, as long as its node is open.
pub(crate) struct Backing {
    pub(crate) id: BackingId,
    /// Its path when it was opened, if it had a name.
    pub(super) at: Option<LayerPath>,
    /// The layer that the file was in.
    pub(super) layer: LayerId,
    pub(super) kernel: Arc<dyn BackingFiles>,
}

impl std::fmt::Debug for Backing {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Backing({:?} in {:?})", self.id, self.layer)
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        self.kernel.close_backing(self.id);
    }
}

/// The open files of one view, by handle.
#[derive(Debug, Default)]
pub struct Handles {
    table: HashMap<u64, Open>,
    next: u64,
}

impl Handles {
    pub(crate) fn add(
        &mut self,
        node: NodeIndex,
        file: OwnedFd,
        writable: bool,
        partial: Option<Arc<PartialCopy>>,
        file_use: Option<Arc<FileAccount>>,
    ) -> u64 {
        self.next += 1;
        let file = Arc::new(file);
        let open = Open { node, file, writable, executed: false, file_use, partial };
        self.table.insert(self.next, open);
        self.next
    }

    /// The descriptor of an open file.
    pub fn file(&self, handle: u64) -> Result<Arc<OwnedFd>> {
        self.table.get(&handle).map(|open| Arc::clone(&open.file)).ok_or(Errno::BADF)
    }

    /// The first `size` bytes of an open file.
    pub fn content(&self, handle: u64, size: usize) -> Result<Vec<u8>> {
        let mut content = vec![0; size];
        let read = rustix::io::pread(&*self.file(handle)?, content.as_mut_slice(), 0)?;
        content.truncate(read);
        Ok(content)
    }

    /// Marks an open file as opened for execution.
    pub(crate) fn mark_executed(&mut self, handle: u64) {
        if let Some(open) = self.table.get_mut(&handle) {
            open.executed = true;
        }
    }

    /// Whether one of these is opened for execution.
    pub(crate) fn is_executed(&self, handles: &[u64]) -> bool {
        handles.iter().filter_map(|handle| self.table.get(handle)).any(|open| open.executed)
    }

    /// The account of an open file, if it has one.
    pub fn file_use(&self, handle: u64) -> Option<Arc<FileAccount>> {
        self.table.get(&handle)?.file_use.clone()
    }

    /// Replaces the file and the account of a handle: its node was copied up.
    pub(crate) fn replace_file(
        &mut self,
        handle: u64,
        new: Arc<OwnedFd>,
        copy: Option<Arc<PartialCopy>>,
        account: Option<Arc<FileAccount>>,
    ) {
        if let Some(open) = self.table.get_mut(&handle) {
            (open.file, open.partial, open.file_use) = (new, copy, account);
        }
    }

    /// The partial copy of an open file, if it is one.
    pub fn partial(&self, handle: u64) -> Option<Arc<PartialCopy>> {
        self.table.get(&handle)?.partial.clone()
    }

    /// A file that was opened for writing, with its account, if it has one.
    pub(crate) fn counted(&self, handle: u64) -> Option<(Arc<FileAccount>, Arc<OwnedFd>)> {
        let open = self.table.get(&handle).filter(|open| open.writable)?;
        Some((Arc::clone(open.file_use.as_ref()?), Arc::clone(&open.file)))
    }

    /// Removes a handle that the kernel has released. Returns its node; `None` if the handle is unknown.
    pub(crate) fn remove(&mut self, handle: u64) -> Option<NodeIndex> {
        Some(self.table.remove(&handle)?.node)
    }

    /// Nodes that are open for writing.
    pub(crate) fn written(&self) -> impl Iterator<Item = NodeIndex> {
        self.table.values().filter(|open| open.writable).map(|open| open.node)
    }
}
