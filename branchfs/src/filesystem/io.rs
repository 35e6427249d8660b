//! Content of open files: read and written under the gate alone.

use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;

use super::BranchFilesystem;
use branchfs_core::file_io::FileIo;
use branchfs_core::quota::FileAccount;
use branchfs_core::view::CopyData;
use branchfs_fuse::{Caller, FsResult, Handle, NodeId};

impl BranchFilesystem {
    pub(super) fn content(&self, node: NodeId, handle: Handle) -> FsResult<FileIo> {
        let (mounted, _) = self.at(node)?;
        let view = mounted.live()?;
        Ok(FileIo { file: view.handles.file(handle.0)?, partial: view.handles.partial(handle.0) })
    }

    fn writable_content(
        &self,
        node: NodeId,
        handle: Handle,
    ) -> FsResult<(FileIo, Option<Arc<FileAccount>>)> {
        let (mounted, index) = self.at(node)?;
        let mut view = mounted.writable()?;
        // After a commit of a child the former top layer is a lower layer.
        view.copy_up(index, CopyData::Yes)?;
        let (file, partial) = (view.handles.file(handle.0)?, view.handles.partial(handle.0));
        Ok((FileIo { file, partial }, view.handles.file_use(handle.0)))
    }

    pub(super) fn read_file(
        &self,
        node: NodeId,
        handle: Handle,
        offset: u64,
        buffer: &mut [u8],
    ) -> FsResult<usize> {
        if let (slot, Some(control_file)) = self.control_file_at(node) {
            let content = control_file.read(slot)?;
            let rest = usize::try_from(offset).ok().and_then(|from| content.as_bytes().get(from..));
            let count = rest.map_or(0, |rest| rest.len().min(buffer.len()));
            buffer[..count].copy_from_slice(&rest.unwrap_or_default()[..count]);
            return Ok(count);
        }
        let _pass = self.mount.enter_request();
        self.content(node, handle)?.read(offset, buffer)
    }

    pub(super) fn write_file(
        &self,
        node: NodeId,
        handle: Handle,
        offset: u64,
        data: &[u8],
        kill_privileges: bool,
    ) -> FsResult<usize> {
        if let (slot, Some(control_file)) = self.control_file_at(node) {
            return control_file.write(slot, data).map(|()| data.len());
        }
        let _pass = self.mount.enter_request();
        let (content, file_use) = self.writable_content(node, handle)?;
        self.kill_privileges(node, &content, kill_privileges)?;
        let write = || content.write(offset, data);
        match file_use {
            Some(file_use) => {
                file_use.write(content.file.as_fd(), offset, data.len() as u64, write)
            }
            None => write(),
        }
    }

    /// Removes capabilities after a change of content, and the set-id bits if `set_id` is set.
    fn kill_privileges(&self, node: NodeId, content: &FileIo, set_id: bool) -> FsResult<()> {
        if branchfs_core::view::kill_privileges_of(&*content.file, set_id)? {
            if let Some(kernel) = self.kernel.get() {
                let _ = kernel.invalidate_attributes(node); // the kernel may have none: as good
            }
        }
        Ok(())
    }

    pub(super) fn allocate(
        &self,
        caller: &Caller,
        node: NodeId,
        handle: Handle,
        mode: u32,
        offset: u64,
        length: u64,
    ) -> FsResult<()> {
        let _pass = self.mount.enter_request();
        let (content, file_use) = self.writable_content(node, handle)?;
        self.kill_privileges(node, &content, loses_set_id(caller))?;
        let FileIo { file, partial } = content;
        let mode = FallocateFlags::from_bits_retain(mode);
        match (file_use, partial) {
            (Some(file_use), _) => file_use.allocate(file.as_fd(), mode, offset, length),
            (None, Some(partial)) => partial.allocate(mode, offset, length),
            (None, None) => rustix::fs::fallocate(&*file, mode, offset, length),
        }
    }

    pub(super) fn seek(
        &self,
        node: NodeId,
        handle: Handle,
        offset: u64,
        whence: u32,
    ) -> FsResult<u64> {
        const SEEK_DATA: u32 = 3;
        const SEEK_HOLE: u32 = 4;
        let FileIo { file, partial } = self.content(node, handle)?;
        match (whence, partial) {
            (SEEK_DATA, Some(partial)) => partial.seek_data(offset),
            (SEEK_HOLE, Some(partial)) => partial.seek_hole(offset),
            (SEEK_DATA, None) => rustix::fs::seek(&*file, SeekFrom::Data(offset)),
            (SEEK_HOLE, None) => rustix::fs::seek(&*file, SeekFrom::Hole(offset)),
            _ => Err(Errno::INVAL),
        }
    }

    pub(super) fn copy_range(
        &self,
        caller: &Caller,
        from: (NodeId, Handle, u64),
        to: (NodeId, Handle, u64),
        length: u64,
    ) -> FsResult<usize> {
        let _pass = self.mount.enter_request();
        let source = self.content(from.0, from.1)?;
        let (target, file_use) = self.writable_content(to.0, to.1)?;
        self.kill_privileges(to.0, &target, loses_set_id(caller))?;
        let copy = |length: u64| target.copy_from(&source, from.2, to.2, length);
        let Some(file_use) = file_use else { return copy(length) };
        // Asked for more than there is, it copies what there is: no more is to be taken.
        let size = u64::try_from(rustix::fs::fstat(&*source.file)?.st_size).unwrap_or(0);
        let length = length.min(size.saturating_sub(from.2));
        file_use.write(target.file.as_fd(), to.2, length, || copy(length))
    }
}

/// Whether a change of content by this caller takes set-id bits away. The kernel does not say so of these requests; that
/// root may have given up `CAP_FSETID` goes unnoticed.
fn loses_set_id(caller: &Caller) -> bool {
    caller.uid != 0
}
