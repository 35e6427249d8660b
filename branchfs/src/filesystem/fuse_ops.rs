//! The kernel's requests, each led to the view that it is for.

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use rustix::fs::{FallocateFlags, OFlags, RenameFlags, SeekFrom};
use rustix::io::Errno;

use super::control_file::{CONTROL_HANDLE, CONTROL_INDEX};
use super::listing::{NAME_ALONE, kind_of};
use super::{
    BranchFilesystem, CONTROL_XATTR, MAIN, MountedBranch, PRIVATE_XATTR, attributes,
    attributes_ttl, entry_of, split, ttl,
};
use branchfs_core::descriptors::admit_file;
use branchfs_core::file_io::FileIo;
use branchfs_core::injected_panics::panic_if_listed;
use branchfs_core::quota::{Ledger, Quota};
use branchfs_core::vfs;
use branchfs_core::view::{New, NodeIndex, OpenedFile, Owner, ROOT, View};
use branchfs_fuse::{
    Attributes, BackingId, Caller, Capabilities, DirectorySink, Entry, FOREVER, Filesystem,
    FsResult, Handle, NodeId, OpenFlags, OpenReply, SetAttr, SetTime, Statfs, Time,
};

/// Attributes that may change through a mapping are not cached.
fn attributes_ttl_of(mounted: &MountedBranch, view: &mut View, index: NodeIndex) -> Duration {
    if view.attributes_are_stable(index) { attributes_ttl(mounted, index) } else { Duration::ZERO }
}

fn opened(mounted: &MountedBranch, file: &OpenedFile) -> OpenReply {
    OpenReply {
        handle: Some(Handle(file.handle)),
        // Not with a backing file: the kernel takes that for a mistake.
        keep_cache: mounted.slot != MAIN && file.backing.is_none() && file.keeps_pages,
        backing: file.backing.map(|backing| BackingId(backing.0)),
        ..OpenReply::default()
    }
}

/// Whether a change of content by this caller takes set-id bits away. The kernel does not say so of these requests; that
/// root may have given up `CAP_FSETID` goes unnoticed.
fn loses_set_id(caller: &Caller) -> bool {
    caller.uid != 0
}

fn set_attr(changes: &SetAttr) -> vfs::SetAttr {
    let time = |time: SetTime| match time {
        SetTime::Now => vfs::SetTime::Now,
        SetTime::At(Time { seconds, nanoseconds }) => {
            vfs::SetTime::At(vfs::Time { seconds, nanoseconds })
        }
    };
    vfs::SetAttr {
        mode: changes.mode,
        uid: changes.uid,
        gid: changes.gid,
        size: changes.size,
        atime: changes.atime.map(time),
        mtime: changes.mtime.map(time),
        handle: changes.handle.map(|handle| handle.0),
        kill_privileges: changes.kill_privileges,
    }
}

impl Filesystem for BranchFilesystem {
    fn init(&self, capabilities: &Capabilities) {
        // INIT comes once.
        let _ = self.views.has_epoch.set(capabilities.epoch);
        self.passthrough.init(capabilities);
    }

    fn lookup(&self, _caller: &Caller, parent: NodeId, name: &OsStr) -> FsResult<Entry> {
        let _pass = self.views.mount.enter_request();
        let (mounted, parent) = self.views.at(parent)?;
        if let Some(entry) = self.views.branch_entry(&mounted, parent, name) {
            return entry;
        }
        if self.views.is_control_name(parent, name) {
            return self.views.control_entry(mounted.slot);
        }
        let mut view = mounted.live()?;
        if let Some((index, attributes)) = view.tree.lookup(parent, name)? {
            view.tree.nodes.add_lookup(index);
            return Ok(entry_of(&mounted, &mut view, index, attributes));
        }
        let may_become_branch = parent == ROOT && name.as_bytes().starts_with(b"@");
        if may_become_branch || !self.views.may_cache_absence(&mounted) {
            return Err(Errno::NOENT);
        }
        Ok(Entry {
            node: None,
            generation: 0,
            entry_ttl: FOREVER,
            attributes_ttl: FOREVER,
            attributes: None,
        })
    }

    fn forget(&self, node: NodeId, count: u64) {
        let _pass = self.views.mount.enter_request();
        if let Ok((mounted, index)) = self.views.at(node) {
            if index != ROOT {
                mounted.lock_as_it_is().tree.nodes.drop_lookups(index, count);
            }
        }
    }

    fn getattr(&self, node: NodeId, _handle: Option<Handle>) -> FsResult<(Attributes, Duration)> {
        let _pass = self.views.mount.enter_request();
        let (mounted, index) = self.views.at(node)?;
        if self.views.control_file(index).is_some() {
            return Ok((attributes(self.views.control_attributes()?), Duration::ZERO));
        }
        if index == ROOT {
            return Ok((
                attributes(self.views.root_attributes(&mounted)?),
                attributes_ttl(&mounted, index),
            ));
        }
        let mut view = mounted.live()?;
        Ok((attributes(view.tree.getattr(index)?), attributes_ttl_of(&mounted, &mut view, index)))
    }

    fn setattr(
        &self,
        _caller: &Caller,
        node: NodeId,
        changes: &SetAttr,
    ) -> FsResult<(Attributes, Duration)> {
        let _pass = self.views.mount.enter_request();
        let (mounted, index) = self.views.at(node)?;
        if self.views.control_file(index).is_some() {
            // A shell that redirects to it truncates it first.
            let only_size =
                changes.mode.is_none() && changes.uid.is_none() && changes.gid.is_none();
            let found = if only_size { self.views.control_attributes() } else { Err(Errno::PERM) };
            return Ok((attributes(found?), Duration::ZERO));
        }
        let mut view = mounted.writable()?;
        let found = view.setattr(index, &set_attr(changes))?;
        let ttl = if view.attributes_are_stable(index) { ttl(&mounted) } else { Duration::ZERO };
        Ok((attributes(found), ttl))
    }

    fn readlink(&self, node: NodeId) -> FsResult<Vec<u8>> {
        let _pass = self.views.mount.enter_request();
        let (mounted, index) = self.views.at(node)?;
        mounted.live()?.readlink(index)
    }

    fn mknod(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: (u32, u32),
    ) -> FsResult<Entry> {
        let new = match rustix::fs::FileType::from_raw_mode(mode) {
            rustix::fs::FileType::RegularFile => New::File { mode },
            _ => New::Special { mode, device: rdev },
        };
        self.views.make(caller, parent, name, new, umask).map(|(entry, _)| entry)
    }

    fn mkdir(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        mode: u32,
        umask: u32,
    ) -> FsResult<Entry> {
        self.views
            .make(caller, parent, name, New::Directory { mode }, umask)
            .map(|(entry, _)| entry)
    }

    fn symlink(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        target: &OsStr,
    ) -> FsResult<Entry> {
        self.views.make(caller, parent, name, New::Symlink { target }, 0).map(|(entry, _)| entry)
    }

    fn unlink(&self, _caller: &Caller, parent: NodeId, name: &OsStr) -> FsResult<()> {
        let _pass = self.views.mount.enter_request();
        let (mounted, parent) = self.views.at(parent)?;
        if self.views.is_control_name(parent, name) {
            return Err(Errno::PERM);
        }
        mounted.writable()?.unlink(parent, name)
    }

    fn rmdir(&self, _caller: &Caller, parent: NodeId, name: &OsStr) -> FsResult<()> {
        let _pass = self.views.mount.enter_request();
        let (mounted, parent) = self.views.at(parent)?;
        if self.views.branch_entry(&mounted, parent, name).is_some() {
            return Err(Errno::BUSY);
        }
        mounted.writable()?.rmdir(parent, name)
    }

    fn rename(
        &self,
        _caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        new_parent: NodeId,
        new_name: &OsStr,
        flags: u32,
    ) -> FsResult<()> {
        let _pass = self.views.mount.enter_request();
        let flags = RenameFlags::from_bits_retain(flags);
        if !(RenameFlags::NOREPLACE | RenameFlags::EXCHANGE).contains(flags) {
            return Err(Errno::INVAL); // a branch has no whiteouts that a program could see
        }
        let (mounted, parent) = self.views.at(parent)?;
        let (new_slot, new_parent) = split(new_parent);
        if new_slot != mounted.slot {
            return Err(Errno::XDEV); // another branch
        }
        for (parent, name) in [(parent, name), (new_parent, new_name)] {
            if self.views.branch_entry(&mounted, parent, name).is_some() {
                return Err(Errno::BUSY);
            }
            if self.views.is_control_name(parent, name) {
                return Err(Errno::PERM);
            }
        }
        mounted.writable()?.rename((parent, name), (new_parent, new_name), flags)
    }

    fn link(
        &self,
        _caller: &Caller,
        node: NodeId,
        new_parent: NodeId,
        new_name: &OsStr,
    ) -> FsResult<Entry> {
        let _pass = self.views.mount.enter_request();
        let (mounted, index) = self.views.at(node)?;
        let (new_slot, new_parent) = split(new_parent);
        if new_slot != mounted.slot {
            return Err(Errno::XDEV);
        }
        self.views.refuse_branch_name(&mounted, new_parent, new_name)?;
        let mut view = mounted.writable()?;
        let attributes = view.link(index, new_parent, new_name)?;
        view.tree.nodes.add_lookup(index);
        Ok(entry_of(&mounted, &mut view, index, attributes))
    }

    fn open(&self, _caller: &Caller, node: NodeId, flags: OpenFlags) -> FsResult<OpenReply> {
        let _pass = self.views.mount.enter_request();
        let (mounted, index) = self.views.at(node)?;
        if self.views.control_file(index).is_some() {
            return Ok(OpenReply {
                handle: Some(CONTROL_HANDLE),
                direct_io: true,
                ..OpenReply::default()
            });
        }
        let wanted = OFlags::from_bits_retain(flags.flags);
        let changes = wanted.intersects(OFlags::WRONLY | OFlags::RDWR | OFlags::TRUNC);
        if changes {
            admit_file()?; // before it is copied up or truncated
        }
        let mut view = if changes { mounted.writable()? } else { mounted.live()? };
        let file =
            view.open(index, wanted, flags.kill_privileges, self.passthrough.backer(&mounted))?;
        self.notifications.store_content(&mounted, &view, node, &file);
        drop(view);
        if file.outdates_attributes {
            self.notifications.invalidate_attributes(node);
        }
        Ok(opened(&mounted, &file))
    }

    fn flush(&self, _node: NodeId, _handle: Handle) -> FsResult<()> {
        Err(Errno::NOSYS) // every write has reached the layer already; the kernel stops asking
    }

    fn release(&self, node: NodeId, handle: Handle) {
        let _pass = self.views.mount.enter_request();
        let Ok((mounted, _)) = self.views.at(node) else {
            return;
        };
        mounted.lock().close(handle.0);
    }

    fn fsync(&self, node: NodeId, handle: Handle, data_only: bool) -> FsResult<()> {
        self.views.mount.sync_records(split(node).0)?;
        self.views.content(node, handle)?.sync(data_only)
    }

    fn fsyncdir(&self, node: NodeId, _data_only: bool) -> FsResult<()> {
        self.views.mount.sync_records(split(node).0)?;
        let (mounted, index) = self.views.at(node)?;
        let at = mounted.live()?.tree.locate(index)?;
        rustix::fs::fsync(at.layer.tree.open(&at.path, OFlags::RDONLY | OFlags::DIRECTORY)?)
    }

    fn getxattr(&self, node: NodeId, name: &OsStr) -> FsResult<Vec<u8>> {
        let _pass = self.views.mount.enter_request();
        let (mounted, index) = self.views.at(node)?;
        if mounted.slot == MAIN && index == ROOT {
            if name == CONTROL_XATTR {
                let path = self.control_socket.get().ok_or(Errno::NODATA)?;
                return Ok(path.as_bytes().to_vec());
            }
            if name == PRIVATE_XATTR {
                return self.private.get().cloned().ok_or(Errno::NODATA);
            }
        }
        let is_apart =
            self.views.control_file.get().is_some() && (index == ROOT || index == CONTROL_INDEX);
        match mounted.live() {
            Ok(view) if index != CONTROL_INDEX => view.getxattr(index, name),
            // The kernel asks for ACLs on its way to the control file, also of a stale branch.
            _ if is_apart => Err(Errno::NODATA),
            other => other.and(Err(Errno::STALE)),
        }
    }

    fn setxattr(
        &self,
        _caller: &Caller,
        node: NodeId,
        name: &OsStr,
        value: &[u8],
        flags: u32,
        acl_kill_sgid: bool,
    ) -> FsResult<()> {
        let _pass = self.views.mount.enter_request();
        let (mounted, index) = self.views.at(node)?;
        mounted.writable()?.setxattr(index, name, value, flags, acl_kill_sgid)
    }

    fn listxattr(&self, node: NodeId) -> FsResult<Vec<u8>> {
        let _pass = self.views.mount.enter_request();
        let (mounted, index) = self.views.at(node)?;
        if self.views.control_file(index).is_some() {
            return Ok(Vec::new());
        }
        mounted.live()?.listxattr(index)
    }

    fn removexattr(&self, _caller: &Caller, node: NodeId, name: &OsStr) -> FsResult<()> {
        let _pass = self.views.mount.enter_request();
        let (mounted, index) = self.views.at(node)?;
        mounted.writable()?.removexattr(index, name)
    }

    fn ioctl(&self, node: NodeId, command: u32) -> FsResult<Vec<u8>> {
        match self.views.control_file_at(node) {
            (slot, Some(control_file)) => control_file.ioctl(slot, command),
            (_, None) => Err(Errno::NOTTY),
        }
    }

    fn may_block(&self, node: NodeId) -> bool {
        self.views.control_file_at(node).1.is_some()
    }

    fn request_received(&self, name: &'static str) {
        panic_if_listed(name);
    }

    fn panicked(&self) {
        self.views.mount.fail_stop.trip("a file system request panicked");
    }

    fn syncfs(&self, node: NodeId) -> FsResult<()> {
        self.views.mount.sync_records(split(node).0)?;
        let (mounted, _) = self.views.at(node)?;
        let at = mounted.live()?.tree.locate(ROOT)?;
        rustix::fs::syncfs(at.layer.tree.open(&at.path, OFlags::RDONLY | OFlags::DIRECTORY)?)
    }

    fn create(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: OpenFlags,
    ) -> FsResult<(Entry, OpenReply)> {
        admit_file()?; // before the file is made
        let (entry, file) = self.views.make(caller, parent, name, New::File { mode }, umask)?;
        let (mounted, index) = self.views.at(entry.node.ok_or(Errno::IO)?)?;
        let mut view = mounted.live()?;
        let access = OFlags::from_bits_retain(flags.flags) & OFlags::RWMODE;
        let file = view.register_new(
            index,
            file.ok_or(Errno::IO)?,
            access,
            self.passthrough.backer(&mounted),
        )?;
        let ttl =
            if view.attributes_are_stable(index) { entry.attributes_ttl } else { Duration::ZERO };
        let entry = Entry { attributes_ttl: ttl, ..entry };
        Ok((entry, opened(&mounted, &file)))
    }

    fn tmpfile(
        &self,
        caller: &Caller,
        parent: NodeId,
        mode: u32,
        umask: u32,
        flags: OpenFlags,
    ) -> FsResult<(Entry, OpenReply)> {
        admit_file()?;
        let _pass = self.views.mount.enter_request();
        let (mounted, parent) = self.views.at(parent)?;
        let mut view = mounted.writable()?;
        let owner = Owner { uid: caller.uid, gid: caller.gid };
        let (index, attributes, file) = view.create_unnamed(parent, mode, umask, owner)?;
        view.tree.nodes.add_lookup(index);
        let access = OFlags::from_bits_retain(flags.flags) & OFlags::RWMODE;
        let file = view.register_new(index, file, access, self.passthrough.backer(&mounted))?;
        let entry = entry_of(&mounted, &mut view, index, attributes);
        Ok((entry, opened(&mounted, &file)))
    }

    fn read(
        &self,
        node: NodeId,
        handle: Handle,
        offset: u64,
        buffer: &mut [u8],
    ) -> FsResult<usize> {
        if let (slot, Some(control_file)) = self.views.control_file_at(node) {
            let content = control_file.read(slot)?;
            let rest = usize::try_from(offset).ok().and_then(|from| content.as_bytes().get(from..));
            let count = rest.map_or(0, |rest| rest.len().min(buffer.len()));
            buffer[..count].copy_from_slice(&rest.unwrap_or_default()[..count]);
            return Ok(count);
        }
        let _pass = self.views.mount.enter_request();
        self.views.content(node, handle)?.read(offset, buffer)
    }

    fn write(
        &self,
        node: NodeId,
        handle: Handle,
        offset: u64,
        data: &[u8],
        kill_privileges: bool,
    ) -> FsResult<usize> {
        if let (slot, Some(control_file)) = self.views.control_file_at(node) {
            return control_file.write(slot, data).map(|()| data.len());
        }
        let _pass = self.views.mount.enter_request();
        let (content, file_use) = self.views.writable_content(node, handle)?;
        self.notifications.kill_privileges(node, &content, kill_privileges)?;
        let write = || content.write(offset, data);
        match file_use {
            Some(file_use) => {
                file_use.write(content.file.as_fd(), offset, data.len() as u64, write)
            }
            None => write(),
        }
    }

    fn fallocate(
        &self,
        caller: &Caller,
        node: NodeId,
        handle: Handle,
        mode: u32,
        offset: u64,
        length: u64,
    ) -> FsResult<()> {
        let _pass = self.views.mount.enter_request();
        let (content, file_use) = self.views.writable_content(node, handle)?;
        self.notifications.kill_privileges(node, &content, loses_set_id(caller))?;
        let FileIo { file, partial } = content;
        let mode = FallocateFlags::from_bits_retain(mode);
        match (file_use, partial) {
            (Some(file_use), _) => file_use.allocate(file.as_fd(), mode, offset, length),
            (None, Some(partial)) => partial.allocate(mode, offset, length),
            (None, None) => rustix::fs::fallocate(&*file, mode, offset, length),
        }
    }

    fn lseek(&self, node: NodeId, handle: Handle, offset: u64, whence: u32) -> FsResult<u64> {
        const SEEK_DATA: u32 = 3;
        const SEEK_HOLE: u32 = 4;
        let FileIo { file, partial } = self.views.content(node, handle)?;
        match (whence, partial) {
            (SEEK_DATA, Some(partial)) => partial.seek_data(offset),
            (SEEK_HOLE, Some(partial)) => partial.seek_hole(offset),
            (SEEK_DATA, None) => rustix::fs::seek(&*file, SeekFrom::Data(offset)),
            (SEEK_HOLE, None) => rustix::fs::seek(&*file, SeekFrom::Hole(offset)),
            _ => Err(Errno::INVAL),
        }
    }

    fn copy_file_range(
        &self,
        caller: &Caller,
        from: (NodeId, Handle, u64),
        to: (NodeId, Handle, u64),
        length: u64,
        _flags: u64,
    ) -> FsResult<usize> {
        let _pass = self.views.mount.enter_request();
        let source = self.views.content(from.0, from.1)?;
        let (target, file_use) = self.views.writable_content(to.0, to.1)?;
        self.notifications.kill_privileges(to.0, &target, loses_set_id(caller))?;
        let copy = |length: u64| target.copy_from(&source, from.2, to.2, length);
        let Some(file_use) = file_use else { return copy(length) };
        // Asked for more than there is, it copies what there is: no more is to be taken.
        let size = u64::try_from(rustix::fs::fstat(&*source.file)?.st_size).unwrap_or(0);
        let length = length.min(size.saturating_sub(from.2));
        file_use.write(target.file.as_fd(), to.2, length, || copy(length))
    }

    fn readdir(
        &self,
        _caller: &Caller,
        node: NodeId,
        offset: u64,
        plus: bool,
        sink: &mut dyn DirectorySink,
    ) -> FsResult<()> {
        let (slot, index) = split(node);
        if slot == MAIN && offset > 0 {
            // The kernel has cached the part that was read. It must be invalidated before the end is reported: the
            // kernel does not cache an incomplete listing.
            self.notifications.invalidate_node(node);
        }
        let _pass = self.views.mount.enter_request();
        let mounted = self.views.mount.mounted(slot)?;
        let mut view = mounted.live()?;
        let listing = view.listing(index, offset)?;
        let push = |sink: &mut dyn DirectorySink, ino: u64, next: u64, kind: u8, name: &OsStr| {
            if plus {
                sink.push_plus(&NAME_ALONE, ino, next, kind, name)
            } else {
                sink.push(ino, next, kind, name)
            }
        };
        const DIRECTORY: u8 = 4;
        let own_ino = |view: &View| view.tree.getattr(index).map_or(1, |own| own.ino);
        if offset == 0 && !push(sink, own_ino(&view), 1, DIRECTORY, OsStr::new(".")) {
            return Ok(());
        }
        if offset <= 1 && !push(sink, view.parent_ino(index), 2, DIRECTORY, OsStr::new("..")) {
            return Ok(());
        }
        let rest = &listing[listing.partition_point(|listed| listed.offset <= offset)..];
        if rest.is_empty() && offset > 0 {
            view.end_listing(index);
        }
        for listed in rest {
            let (entry, next, kind) = (&listed.entry, listed.offset, kind_of(listed.entry.kind));
            if plus && !sink.has_room(&entry.name) {
                break;
            }
            let found = if plus {
                self.views.entry_attributes(&mounted, &mut view, index, &entry.name)
            } else {
                None
            };
            let pushed = match &found {
                Some((child, told)) => {
                    let ino = told.attributes.map_or(entry.ino, |attributes| attributes.ino);
                    let pushed = sink.push_plus(told, ino, next, kind, &entry.name);
                    if !pushed {
                        view.tree.nodes.drop_lookups(*child, 1);
                    }
                    pushed
                }
                None => push(sink, entry.ino, next, kind, &entry.name),
            };
            if !pushed {
                break;
            }
        }
        Ok(())
    }

    fn statfs(&self, node: NodeId) -> FsResult<Statfs> {
        let (mounted, _) = self.views.at(node)?;
        let view = mounted.live()?;
        let (root, at) = (view.tree.top(), view.tree.locate(ROOT)?);
        drop(view);
        let opened = at.layer.tree.open(&at.path, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let found = rustix::fs::fstatvfs(opened.as_fd())?;
        let narrow = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        // Under a disk limit the branch is as large as that.
        let quota = root.ledger().map(Ledger::quota);
        let left = quota.and_then(Quota::available).map(|left| left / found.f_frsize.max(1));
        let used = quota.map_or(0, Quota::used) / found.f_frsize.max(1);
        let within = |value: u64| left.map_or(value, |left| value.min(left));
        Ok(Statfs {
            blocks: left.map_or(found.f_blocks, |left| found.f_blocks.min(left + used)),
            blocks_free: within(found.f_bfree),
            blocks_available: within(found.f_bavail),
            files: found.f_files,
            files_free: found.f_ffree,
            block_size: narrow(found.f_bsize),
            fragment_size: narrow(found.f_frsize),
            name_max: narrow(found.f_namemax),
        })
    }
}
