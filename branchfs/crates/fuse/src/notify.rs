//! Sends notifications to the kernel.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use rustix::io::Errno;

use crate::abi::Output;
use crate::filesystem::{BackingId, FsResult, KernelNotifier, NodeId};
use crate::request_counters::RequestCounters;

/// The [`KernelNotifier`] of a session.
pub(super) struct Notifier {
    pub(super) device: Arc<OwnedFd>,
    pub(super) request_counters: Arc<RequestCounters>,
}

impl Notifier {
    fn send(&self, code: i32, fill: impl FnOnce(&mut Output)) -> FsResult<()> {
        let mut output = Output::default();
        output.clear();
        fill(&mut output);
        match rustix::io::write(self.device.as_fd(), output.finish_notification(code)) {
            Ok(_) | Err(Errno::NOENT | Errno::NODEV | Errno::NOTCONN) => Ok(()),
            Err(Errno::INVAL) => Err(Errno::NOSYS),
            Err(error) => Err(error),
        }
    }

    /// Invalidates the attributes, and the cached content from `offset` to the end.
    fn forget_node(&self, node: NodeId, offset: u64) -> FsResult<()> {
        const INVAL_INODE: i32 = 2;
        self.send(INVAL_INODE, |output| {
            output.u64(node.0);
            output.u64(offset);
            output.u64(0); // length 0: to the end
        })
    }

    fn forget_entry(&self, parent: NodeId, name: &OsStr, flags: u32) -> FsResult<()> {
        const INVAL_ENTRY: i32 = 3;
        self.send(INVAL_ENTRY, |output| {
            output.u64(parent.0);
            output.u32(u32::try_from(name.len()).unwrap_or(0));
            output.u32(flags);
            output.bytes(name.as_bytes());
            output.bytes(&[0]);
        })
    }
}

impl KernelNotifier for Notifier {
    fn invalidate_node(&self, node: NodeId) -> FsResult<()> {
        self.forget_node(node, 0)
    }

    fn invalidate_entry(&self, parent: NodeId, name: &OsStr) -> FsResult<()> {
        self.forget_entry(parent, name, 0)
    }

    fn expire_entry(&self, parent: NodeId, name: &OsStr) -> FsResult<()> {
        const EXPIRE_ONLY: u32 = 1; // ignored by a kernel that does not know it
        self.forget_entry(parent, name, EXPIRE_ONLY)
    }

    fn increment_epoch(&self) -> FsResult<()> {
        const INC_EPOCH: i32 = 8;
        self.send(INC_EPOCH, |_| {})
    }

    fn invalidate_attributes(&self, node: NodeId) -> FsResult<()> {
        const NO_PAGES: u64 = u64::MAX; // offset -1
        self.forget_node(node, NO_PAGES)
    }

    fn store(&self, node: NodeId, content: &[u8]) -> FsResult<()> {
        const STORE: i32 = 4;
        self.send(STORE, |output| {
            output.u64(node.0);
            output.u64(0);
            output.u32(u32::try_from(content.len()).unwrap_or(0));
            output.u32(0);
            output.bytes(content);
        })
    }

    fn open_backing(&self, file: BorrowedFd<'_>) -> FsResult<BackingId> {
        crate::backing::open_backing(self.device.as_fd(), file).map(BackingId)
    }

    fn request_counts(&self) -> Vec<(&'static str, u64)> {
        self.request_counters.counts()
    }

    fn close_backing(&self, backing: BackingId) {
        // Fails only if the id is not registered or the filesystem is unmounted: nothing is left to close.
        let _ = crate::backing::close_backing(self.device.as_fd(), backing.0);
    }
}
