//! Open files and directories of one view.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;

use super::nodes::Index;
use crate::partial::PartialCopy;
use crate::quota::FileUse;
use crate::tree::{DirectoryEntry, Result};

/// What a handle number stands for.
#[derive(Debug)]
enum Open {
    File {
        node: Index,
        file: Arc<OwnedFd>,
        writable: bool,
        /// Somebody runs it.
        executed: bool,
        /// Where what the branch adds is limited.
        file_use: Option<Arc<FileUse>>,
        /// Where the file was copied up in part.
        partial: Option<Arc<PartialCopy>>,
    },
    Directory(OpenDirectory),
}

/// An open directory: its listing is taken once, so that offsets stay valid while entries come and go.
#[derive(Debug)]
pub(crate) struct OpenDirectory {
    pub(crate) node: Index,
    /// `None` until it is first read, and again after a rewind.
    pub(crate) listing: Option<Arc<Vec<DirectoryEntry>>>,
}

/// The table.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    table: HashMap<u64, Open>,
    next: u64,
}

impl Handles {
    fn add(&mut self, open: Open) -> u64 {
        self.next += 1;
        self.table.insert(self.next, open);
        self.next
    }

    pub(crate) fn add_file(
        &mut self,
        node: Index,
        file: OwnedFd,
        writable: bool,
        partial: Option<Arc<PartialCopy>>,
    ) -> u64 {
        let file = Arc::new(file);
        self.add(Open::File { node, file, writable, executed: false, file_use: None, partial })
    }

    pub(crate) fn add_directory(&mut self, node: Index) -> u64 {
        self.add(Open::Directory(OpenDirectory { node, listing: None }))
    }

    /// The descriptor of an open file.
    pub(crate) fn file(&self, handle: u64) -> Result<Arc<OwnedFd>> {
        match self.table.get(&handle) {
            Some(Open::File { file, .. }) => Ok(Arc::clone(file)),
            _ => Err(Errno::BADF),
        }
    }

    /// Somebody runs the open file.
    pub(crate) fn mark_executed(&mut self, handle: u64) {
        if let Some(Open::File { executed, .. }) = self.table.get_mut(&handle) {
            *executed = true;
        }
    }

    pub(crate) fn is_executed(&self, handle: u64) -> bool {
        matches!(self.table.get(&handle), Some(Open::File { executed: true, .. }))
    }

    pub(crate) fn directory(&mut self, handle: u64) -> Result<&mut OpenDirectory> {
        match self.table.get_mut(&handle) {
            Some(Open::Directory(directory)) => Ok(directory),
            _ => Err(Errno::BADF),
        }
    }

    /// The account of an open file, if it has one.
    pub(crate) fn file_use(&self, handle: u64) -> Option<Arc<FileUse>> {
        match self.table.get(&handle) {
            Some(Open::File { file_use, .. }) => file_use.clone(),
            _ => None,
        }
    }

    /// Keeps a file's account as long as it is open.
    pub(crate) fn account(&mut self, handle: u64, new: Option<Arc<FileUse>>) {
        if let Some(Open::File { file_use, .. }) = self.table.get_mut(&handle) {
            *file_use = new;
        }
    }

    /// Lets a handle go on with another file: its node was copied up, maybe in part.
    pub(crate) fn replace_file(
        &mut self,
        handle: u64,
        new: Arc<OwnedFd>,
        copy: Option<Arc<PartialCopy>>,
    ) {
        if let Some(Open::File { file, partial, .. }) = self.table.get_mut(&handle) {
            *file = new;
            *partial = copy;
        }
    }

    /// The partial copy that an open file is, if it is one.
    pub(crate) fn partial(&self, handle: u64) -> Option<Arc<PartialCopy>> {
        match self.table.get(&handle) {
            Some(Open::File { partial, .. }) => partial.clone(),
            _ => None,
        }
    }

    /// A file that was open for writing, with its account, if it has one.
    pub(crate) fn counted(&self, handle: u64) -> Option<(Arc<FileUse>, Arc<OwnedFd>)> {
        match self.table.get(&handle) {
            Some(Open::File { file, writable: true, file_use: Some(file_use), .. }) => {
                Some((Arc::clone(file_use), Arc::clone(file)))
            }
            _ => None,
        }
    }

    /// Forgets a handle; returns its node.
    pub(crate) fn remove(&mut self, handle: u64) -> Option<Index> {
        match self.table.remove(&handle)? {
            Open::File { node, .. } => Some(node),
            Open::Directory(directory) => Some(directory.node),
        }
    }

    /// Nodes that are open for writing.
    pub(crate) fn written(&self) -> impl Iterator<Item = Index> {
        self.table.values().filter_map(|open| match open {
            Open::File { node, writable: true, .. } => Some(*node),
            _ => None,
        })
    }
}
