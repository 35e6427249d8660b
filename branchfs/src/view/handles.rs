//! Open files and directories of one view.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;

use super::nodes::Index;
use crate::tree::{DirectoryEntry, Result};

/// What a handle number stands for.
#[derive(Debug)]
enum Open {
    File { node: Index, file: Arc<OwnedFd>, writable: bool },
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

    pub(crate) fn add_file(&mut self, node: Index, file: OwnedFd, writable: bool) -> u64 {
        self.add(Open::File { node, file: Arc::new(file), writable })
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

    pub(crate) fn directory(&mut self, handle: u64) -> Result<&mut OpenDirectory> {
        match self.table.get_mut(&handle) {
            Some(Open::Directory(directory)) => Ok(directory),
            _ => Err(Errno::BADF),
        }
    }

    /// Lets a handle go on with another file: its node was copied up.
    pub(crate) fn replace_file(&mut self, handle: u64, new: Arc<OwnedFd>) {
        if let Some(Open::File { file, .. }) = self.table.get_mut(&handle) {
            *file = new;
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
