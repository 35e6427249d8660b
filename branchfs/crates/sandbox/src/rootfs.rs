//! Builds the file system view of a sandboxed process in a new mount namespace.
//!
//! ```text
//! all mounts               read-only
//! the workspace's path     the branch, writable
//! /tmp /var/tmp /dev/shm   empty and private
//! /dev                     harmless devices, private terminals
//! /run                     only files for name resolution: other programs have sockets here
//! /proc                    the sandbox's processes; files that control the machine are masked
//! private directories      empty, at every path that leads to them
//! caches                   writable, as in all other branches
//! sockets of programs      visible, but connections are refused
//! hidden files             visible, but cannot be read
//! ```
//!
//! The order matters. A path that must stay visible is cloned as a detached mount before its parent is covered or
//! unmounted, and attached afterwards. A workspace's mount is unmounted in one call with the mounts of all its branches,
//! so the start time does not depend on the number of branches. The private directories are covered after that, because a
//! visible directory may contain them. Only the branch's own part of a private directory is shown in its place.
//! `pivot_root`, the usual method, is refused by Docker's default system call filter. Processes in the sandbox cannot
//! remove a cover: they lack the capability and cannot get it (`privileges`).
//!
//! `branching/process/sandbox/rootfs.py` builds the same for Python functions.

use std::collections::BTreeSet;
use std::ffi::{CStr, OsStr};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{
    DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt, chown, symlink,
};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{
    CWD, FileType, Mode, OFlags, StatVfsMountFlags, fstat, getxattr, open, openat, statvfs,
};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount,
    mount_bind, mount_bind_recursive, mount_change, mount_remount, move_mount, open_tree, unmount,
};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, WaitOptions, chdir, waitpid};

use crate::failure::{Context, Failure, Result};
use crate::masked_files::{self, Watch};
use crate::mount_table::{self, Mount, kept_flags};
use crate::request::{Bytes, Sandbox};
use crate::sys;

const ORDINARY: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);
const SEALED: MountFlags = ORDINARY.union(MountFlags::NOEXEC);
const REPLACED: [&str; 3] = ["/tmp", "/var/tmp", "/run"];
/// Below /run: where /etc/resolv.conf may lead; and where one distribution has all its programs.
const OF_RUN: [&str; 5] =
    ["systemd/resolve", "resolvconf", "NetworkManager", "connman", "current-system"];
/// On the root of a mount that has branches: what no process in a branch should reach.
const PRIVATE_XATTR: &str = "user.branchfs.private";
/// What every store has in it.
const STORE_FILES: [&str; 2] = ["format", "layers"];
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];
const DEVICE_LINKS: [(&str, &str); 5] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];
/// An empty file that cannot be opened. It covers hidden files.
const COVER: &str = "/dev/.covered";
/// An empty directory that covers others. A new file system for each would take longer.
const EMPTY: &str = "/dev/.empty";
const PROC_READ_ONLY: [&str; 5] = ["bus", "fs", "irq", "sys", "sysrq-trigger"];
/// How long another workspace's daemon may take to answer, of which a sandbox asks each.
const ANSWER_MAX: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
const ANSWER_BYTES_MAX: usize = 1 << 16;
/// How long the removal of a directory may take from its mounts to its name.
const REMOVAL_MILLISECONDS_MAX: u32 = 1000;
/// Paths that Docker masks, and paths that only root can read: a branch of root must not.
const MASKED: [&str; 16] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/firmware",
    "/sys/kernel/debug",
    "/sys/kernel/tracing",
    "/sys/kernel/security",
    "/sys/fs/bpf",
    "/sys/fs/fuse/connections",
];

/// The file system view of one sandbox, while it is built.
pub(crate) struct RootFs<'a> {
    sandbox: &'a Sandbox,
    at: PathBuf,
    private: Vec<PathBuf>,
    owner: (u32, u32),
    sockets: Vec<PathBuf>,
    table: Vec<Mount>,
    covers: Vec<PathBuf>,
    shown: Vec<PathBuf>,
    /// Visible directories of which all mounts in them are visible, too.
    with_mounts: Vec<PathBuf>,
    /// The current step, for error messages.
    step: String,
    watch: Option<Watch>,
}

impl<'a> RootFs<'a> {
    pub(crate) fn new(sandbox: &'a Sandbox, owner: (u32, u32), sockets: Vec<PathBuf>) -> Self {
        Self {
            sandbox,
            at: sandbox.at.path(),
            private: sandbox.private.iter().map(Bytes::path).collect(),
            owner,
            sockets,
            table: Vec::new(),
            covers: Vec::new(),
            shown: Vec::new(),
            with_mounts: Vec::new(),
            step: String::new(),
            watch: None,
        }
    }

    /// Returns the last step, and what looks after the covers of hidden files, if there are any.
    pub(crate) fn into_parts(self) -> (String, Option<Watch>) {
        (self.step, self.watch)
    }

    /// Builds it and goes to the workspace. Returns the writable places.
    pub(crate) fn build(&mut self) -> Result<Vec<PathBuf>> {
        self.begin("creating a mount namespace");
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        mount_change("/", private).at("/")?;
        let view = self.sandbox.view.path();
        let is_read_only = is_mounted_read_only(&view)?;
        let branch = cloned(&view)?;
        let mut beside = Vec::new();
        for (source, place) in &self.sandbox.beside {
            beside.push((cloned(&source.path())?, place.path()));
        }
        let mut caches = Vec::new();
        for cache in self.sandbox.caches.iter().map(Bytes::path) {
            caches.push((cloned(&cache)?, is_mounted_read_only(&cache)?, cache));
        }
        let (kept_private, kept): (Vec<_>, Vec<_>) =
            self.kept()?.into_iter().partition(|(_, path)| self.is_private(path));
        let mut devices = Vec::new();
        for name in DEVICES {
            devices.push((name, open_path(Path::new("/dev").join(name), OFlags::empty())?));
        }
        self.begin("unmounting the workspaces");
        let covered = self.unmount_workspaces()?;
        self.begin("making the rest read-only");
        mount_table::make_read_only(&self.table)?;
        self.begin("making /dev");
        self.make_devices(&devices)?;
        self.begin("hiding what belongs to others");
        self.replace()?;
        self.show(kept)?;
        self.cover(&covered)?;
        self.show(kept_private)?;
        self.show(beside)?;
        for (clone, is_read_only, cache) in &caches {
            self.step = format!("showing the cache {}", cache.display());
            self.make_directory(cache)?; // below /tmp, which was replaced
            attach(clone, cache, *is_read_only)?;
        }
        // The caches are mounted over the covers of their entries.
        let is_in_cache =
            |path: &&PathBuf| caches.iter().any(|(_, _, cache)| path.starts_with(cache));
        self.cover(&covered.iter().filter(is_in_cache).cloned().collect::<Vec<_>>())?;
        self.step = format!("showing the branch at {}", self.at.display());
        self.make_directory(&self.at.clone())?;
        attach(&branch, &self.at, is_read_only)?;
        let home = self.make_home()?;
        self.begin("hiding files of the workspace");
        self.hide()?;
        self.begin("mounting /proc");
        make_proc()?;
        self.begin("masking system files");
        mask()?;
        for cover in &self.covers {
            seal_cover(cover)?;
        }
        let start = self.sandbox.start_directory(self.at.clone());
        self.step = format!("entering {}", start.display());
        chdir(&start).at(start)?;
        let places = ["/tmp", "/var/tmp", "/dev", "/proc"].map(PathBuf::from).into_iter();
        let places = places.chain([self.at.clone()]).chain(home);
        let places = places.chain(caches.into_iter().map(|(_, _, cache)| cache));
        Ok(places.filter(|place| place.is_dir()).collect())
    }

    fn begin(&mut self, step: &str) {
        step.clone_into(&mut self.step);
    }

    /// Unmounts all workspaces in this table. Returns what must be covered: the private directories, the workspaces that
    /// could not be unmounted (in a user namespace), and what else belongs to other workspaces: their stores and
    /// sockets. Their bases are ordinary directories.
    ///
    /// A mount that stayed in this table would keep its branch in use after an abort or an unmount.
    fn unmount_workspaces(&mut self) -> Result<Vec<PathBuf>> {
        let mut paths = self.private.clone();
        // Read-only or not, a socket can be connected to.
        paths.extend(self.sockets.iter().filter(|path| is_socket_file(path)).cloned());
        let mut needed = vec![self.at.clone(), self.sandbox.view.path()];
        needed.extend(self.sandbox.beside.iter().map(|(path, _)| path.path()));
        if let Some(mount) = &self.sandbox.mount {
            // Before the table is read: the lines of many branches would take milliseconds.
            paths.extend(self.unmount(&mount.path()));
        }
        let table = mount_table::read()?;
        for mount in table.iter().filter(|mount| mount.is_branchfs()) {
            let is_needed = needed.iter().any(|path| path.starts_with(&mount.point));
            let told = private_paths(mount, is_needed)?.into_iter().skip(1);
            paths.extend(told.filter(|path| is_store_or_socket(path)));
        }
        let workspaces = mount_table::outermost(table.iter().filter(|mount| mount.has_branches()));
        for mount in &workspaces {
            paths.extend(self.unmount(&mount.point));
        }
        self.table = if workspaces.is_empty() { table } else { mount_table::read()? };
        // A single file was mounted and it is a socket: a container is given one so.
        let single = self.table.iter().filter(|mount| mount.root != Path::new("/"));
        paths.extend(single.map(|mount| mount.point.clone()).filter(|point| is_socket_file(point)));
        let left = mount_table::outermost(self.table.iter().filter(|mount| mount.has_branches()));
        paths.extend(left.iter().map(|mount| mount.point.clone()));
        let mut places = Vec::new();
        for place in paths.iter().flat_map(|path| mount_table::places_of(path, &self.table)) {
            // Below the workspace's path the branch will lie over it.
            if !place.starts_with(&self.at) && !places.contains(&place) {
                places.push(place);
            }
        }
        Ok(places)
    }

    /// Unmounts a workspace in this table, with its branches. Returns what must be covered then: a cover has room for
    /// the directories that lead to the workspace's path.
    fn unmount(&self, point: &Path) -> Option<PathBuf> {
        // Not allowed, or out of reach: it stays in the table.
        unmount(point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).ok()?;
        (self.at != point && self.at.starts_with(point)).then(|| point.to_owned())
    }

    /// Clones what lies below a directory that is covered and must be seen all the same.
    fn kept(&mut self) -> Result<Vec<(OwnedFd, PathBuf)>> {
        let of_run = OF_RUN.iter().map(|name| Path::new("/run").join(name));
        let wanted: BTreeSet<_> = of_run.chain(self.sandbox.keep.iter().map(Bytes::path)).collect();
        let mut kept: Vec<(OwnedFd, PathBuf)> = Vec::new();
        let mut ids: Vec<(PathBuf, u64)> = Vec::new();
        for path in wanted {
            let is_replaced =
                REPLACED.iter().any(|cover| path != Path::new(cover) && path.starts_with(cover));
            if !is_replaced && !self.is_private(&path) || path.starts_with(&self.at) {
                continue;
            }
            // It may be gone meanwhile, or the branch has not got it.
            let Ok(file) = self.open_kept(&path) else { continue };
            // A clone shows what lies below it in the same mount.
            let mount = mount_table::id_of(&file)?;
            if ids.iter().any(|(place, id)| *id == mount && path.starts_with(place)) {
                continue;
            }
            ids.push((path.clone(), mount));
            kept.push((self.clone_of_kept(&file, &path)?, path));
        }
        Ok(kept)
    }

    /// Clones a directory. In a user namespace, what is mounted in it comes along.
    fn clone_of_kept(&mut self, file: &OwnedFd, path: &Path) -> Result<OwnedFd> {
        match clone_of(file) {
            Err(Failure { errno: Errno::INVAL, .. }) if !self.is_private(path) => {
                self.with_mounts.push(path.to_owned());
                clone_with(file, OpenTreeFlags::AT_RECURSIVE)
            }
            cloned => cloned,
        }
    }

    fn show(&mut self, kept: Vec<(OwnedFd, PathBuf)>) -> Result<()> {
        for (file, path) in kept {
            if FileType::from_raw_mode(fstat(&file)?.st_mode) == FileType::Directory {
                self.make_directory(&path)?;
            } else {
                if let Some(above) = path.parent() {
                    self.make_directory(above)?;
                }
                touch(&path)?;
            }
            attach(&file, &path, true)?;
            if self.with_mounts.contains(&path) {
                let mut table = mount_table::read()?;
                table.retain(|mount| mount.point != path && mount.point.starts_with(&path));
                mount_table::make_read_only(&table)?;
            }
            self.shown.push(path);
        }
        Ok(())
    }

    /// Creates a directory, if it does not exist, to mount something on.
    ///
    /// What is shown below a replaced directory is read-only, and without the mounts in it. If one of these leads to the
    /// path, its empty mount point is covered, so that it has room.
    fn make_directory(&mut self, path: &Path) -> Result<()> {
        let made = fs::create_dir_all(path).at(path);
        if !matches!(made, Err(Failure { errno: Errno::ROFS, .. })) {
            return made;
        }
        let is_below = |point: &Path| {
            self.shown.iter().any(|place| point != place && point.starts_with(place))
        };
        let points = self.table.iter().map(|mount| &mount.point);
        let points = points.filter(|point| path.starts_with(point) && is_below(point));
        let outermost = points.min_by_key(|point| point.as_os_str().len()).cloned();
        let Some(point) = outermost else { return made };
        tmpfs(&point, SEALED, c"mode=755,size=64k")?;
        self.covers.push(point);
        fs::create_dir_all(path).at(path)
    }

    fn is_private(&self, path: &Path) -> bool {
        self.private.iter().any(|private| path.starts_with(private))
    }

    /// Opens a path that must stay visible; in a private directory, the branch's part of it.
    ///
    /// Symbolic links are not followed. The resolved path has none; a link created since could lead to any directory.
    fn open_kept(&self, path: &Path) -> Result<OwnedFd> {
        for private in &self.private {
            if let Ok(within) = path.strip_prefix(private) {
                return open_exactly(&self.sandbox.view.path(), within);
            }
        }
        open_exactly(Path::new("/"), path.strip_prefix("/").unwrap_or(path))
    }

    fn replace(&mut self) -> Result<()> {
        for place in REPLACED {
            let path = Path::new(place);
            if path.is_dir() && !path.is_symlink() {
                let mode = if place == "/run" { c"mode=755" } else { c"mode=1777" };
                tmpfs(path, ORDINARY, mode)?;
            }
        }
        self.covers.push("/run".into());
        Ok(())
    }

    fn cover(&mut self, places: &[PathBuf]) -> Result<()> {
        for place in places {
            match self.cover_place(place) {
                // It was below a replaced directory, or was removed meanwhile.
                Ok(()) | Err(Failure { errno: Errno::NOENT | Errno::NOTDIR, .. }) => {}
                failed => return failed,
            }
        }
        Ok(())
    }

    fn cover_place(&mut self, place: &Path) -> Result<()> {
        match fs::symlink_metadata(place) {
            // Paths that init cannot access cannot be accessed in the sandbox either. Nor can a FUSE
            // mount whose daemon has died (ENOTCONN): its connection cannot be made again.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EACCES | libc::EPERM | libc::ENOTCONN)
                ) =>
            {
                return Ok(());
            }
            _ => {}
        }
        if self.sockets.iter().any(|socket| socket == place) {
            return cover_socket(place);
        }
        if place.is_dir() {
            tmpfs(place, SEALED, c"mode=755,size=64k")?;
            self.covers.push(place.to_owned());
            return Ok(());
        }
        cover_file(place)
    }

    fn make_devices(&self, devices: &[(&str, OwnedFd)]) -> Result<()> {
        let dev = Path::new("/dev");
        tmpfs(dev, MountFlags::NOSUID, c"mode=755,size=64k")?;
        for (name, file) in devices {
            let place = dev.join(name);
            touch(&place)?;
            mount_bind(format!("/proc/self/fd/{}", file.as_raw_fd()), &place).at(&place)?;
        }
        for (name, target) in DEVICE_LINKS {
            symlink(target, dev.join(name)).at(dev.join(name))?;
        }
        for name in ["pts", "shm"] {
            fs::create_dir(dev.join(name)).at(dev.join(name))?;
        }
        let options = c"ptmxmode=0666,mode=620";
        let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
        mount("devpts", "/dev/pts", "devpts", flags, options).at("/dev/pts")?;
        tmpfs(Path::new("/dev/shm"), ORDINARY, c"mode=1777")?;
        touch(Path::new(COVER))?;
        fs::set_permissions(COVER, Permissions::from_mode(0o000)).at(COVER)?;
        fs::create_dir(EMPTY).at(EMPTY)?;
        seal(dev)
    }

    /// Makes the home, where the place for it is the sandbox's own and nothing else has it.
    fn make_home(&mut self) -> Result<Option<PathBuf>> {
        let Some(home) = self.sandbox.home.as_ref().map(Bytes::path) else { return Ok(None) };
        let is_own =
            ["/tmp", "/var/tmp"].iter().any(|top| home != Path::new(top) && home.starts_with(top));
        if !is_own || fs::symlink_metadata(&home).is_ok() {
            return Ok(None);
        }
        self.step = format!("making the home {}", home.display());
        if let Some(above) = home.parent() {
            fs::create_dir_all(above).at(above)?;
        }
        fs::DirBuilder::new().mode(0o700).create(&home).at(&home)?;
        chown(&home, Some(self.owner.0), Some(self.owner.1)).at(&home)?;
        Ok(Some(home))
    }

    fn hide(&mut self) -> Result<()> {
        if self.sandbox.hide.is_empty() {
            return Ok(());
        }
        let globs: Vec<_> = self.sandbox.hide.iter().map(|glob| glob.0.clone()).collect();
        let table = fs::read(mount_table::MOUNT_TABLE).at(mount_table::MOUNT_TABLE)?;
        let before = mount_table::ids(&table);
        for place in masked_files::find(&self.at, &globs)? {
            if place.is_dir() {
                tmpfs(&place, SEALED, c"mode=000,size=64k")?;
                seal(&place)?;
            } else {
                cover_file(&place)?;
            }
        }
        self.watch = Some(Watch::new(&before)?);
        Ok(())
    }
}

/// Lists the names in the file system of this network's sockets, but for those in /run.
///
/// Whoever binds a socket chooses its name, which may contain newlines: it need not be that of a socket.
pub(crate) fn bound_sockets() -> Result<Vec<PathBuf>> {
    let table = fs::read("/proc/net/unix").at("/proc/net/unix")?;
    let is_var_run_link = Path::new("/var/run").is_symlink(); // to /run
    let mut names: Vec<Vec<u8>> = Vec::new();
    for line in table.split(|&byte| byte == b'\n') {
        match name_in(line) {
            Some(name) => names.push(name.to_vec()),
            None => {
                if let Some(last) = names.last_mut() {
                    last.push(b'\n');
                    last.extend(line);
                }
            }
        }
    }
    let mut paths = Vec::new();
    for name in names {
        let name = name.strip_suffix(b"\n").unwrap_or(&name); // of the table's last line
        let path = PathBuf::from(OsStr::from_bytes(name));
        let is_replaced =
            path.starts_with("/run") || is_var_run_link && path.starts_with("/var/run");
        if path.is_absolute() && !is_replaced && !paths.contains(&path) {
            paths.push(path);
        }
    }
    Ok(paths)
}

/// The name at the end of a line of /proc/net/unix, empty for a socket without a name; `None` if the line is the
/// continuation of a name. A line is `Num: RefCount Protocol Flags Type St Inode Path`, all but the last in hexadecimal digits.
fn name_in(line: &[u8]) -> Option<&[u8]> {
    let colon = line.iter().position(|&byte| byte == b':')?;
    let widths = [8, 8, 8, 4, 2];
    let is_digit = |byte: &u8| matches!(byte, b'0'..=b'9' | b'A'..=b'F');
    if colon == 0 || line[..colon].iter().any(u8::is_ascii_whitespace) {
        return None;
    }
    let mut rest = &line[colon + 1..];
    for width in widths {
        rest = rest.strip_prefix(b" ")?;
        let (digits, more) = rest.split_at_checked(width)?;
        if !digits.iter().all(is_digit) {
            return None;
        }
        rest = more;
    }
    let inode = rest.strip_prefix(b" ")?.trim_ascii_start();
    let end = inode.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(inode.len());
    if end == 0 {
        return None;
    }
    Some(inode[end..].strip_prefix(b" ").unwrap_or(b""))
}

fn is_socket_file(path: &Path) -> bool {
    // It may be gone, or out of reach.
    fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

/// Whether a path is what another workspace's mount calls private. Any user's file system may call itself a BranchFS,
/// and name any path.
fn is_store_or_socket(path: &Path) -> bool {
    STORE_FILES.iter().all(|name| fs::symlink_metadata(path.join(name)).is_ok())
        || is_socket_file(path)
}

/// Opens a path below `top` without following symbolic links (`ELOOP`, `ENOTDIR`).
fn open_exactly(top: &Path, within: &Path) -> Result<OwnedFd> {
    let mut file = open_path(top, OFlags::empty())?;
    for name in within {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        file = openat(&file, name, flags, Mode::empty())?;
    }
    if FileType::from_raw_mode(fstat(&file)?.st_mode) == FileType::Symlink {
        return Err(Errno::LOOP.into());
    }
    Ok(file)
}

fn open_path(path: impl AsRef<Path>, flags: OFlags) -> Result<OwnedFd> {
    open(path.as_ref(), OFlags::PATH | OFlags::CLOEXEC | flags, Mode::empty()).at(path)
}

/// Returns the private paths of a BranchFS mount: base, store and socket.
///
/// The daemon of another workspace may not answer, and a process that waits for it can only be killed. So a separate
/// process asks it. After `ANSWER_MAX`, the default path of the store is assumed.
fn private_paths(mount: &Mount, is_needed: bool) -> Result<Vec<PathBuf>> {
    if !mount.answers() {
        return Ok(Vec::new());
    }
    let found = if is_needed { asked(&mount.point) } else { asked_apart(mount)? };
    let paths = found.split(|&byte| byte == 0).filter(|path| !path.is_empty());
    Ok(paths.map(|path| OsStr::from_bytes(path).into()).collect())
}

fn asked_apart(mount: &Mount) -> Result<Vec<u8>> {
    let (reading, writing) = pipe_with(PipeFlags::CLOEXEC)?;
    let asking = sys::clone(0).calling("clone")?;
    if asking == 0 {
        let _ = rustix::io::write(&writing, &asked(&mount.point));
        sys::exit(0);
    }
    drop(writing);
    let mut events = [PollFd::new(&reading, PollFlags::IN)];
    let is_answered = poll(&mut events, Some(&ANSWER_MAX)).is_ok_and(|ready| ready > 0);
    let mut found = Vec::new();
    if is_answered {
        File::from(reading).read_to_end(&mut found)?;
    } else {
        let _ = sys::kill(asking, libc::SIGKILL);
        let source = mount.source.as_os_str().as_bytes();
        found = [source, b"\0", source, b"/.branching"].concat();
    }
    let _ = waitpid(Pid::from_raw(asking), WaitOptions::empty());
    Ok(found)
}

fn asked(point: &Path) -> Vec<u8> {
    let mut answer = vec![0; ANSWER_BYTES_MAX];
    // Another user's, or a dead one: nothing in the sandbox can reach it.
    let length = getxattr(point, PRIVATE_XATTR, &mut answer[..]).unwrap_or(0);
    answer.truncate(length);
    answer
}

fn cloned(path: &Path) -> Result<OwnedFd> {
    clone_of(&open_path(path, OFlags::DIRECTORY)?)
}

/// A new detached mount of the directory or file, without mounts below it.
fn clone_of(file: &OwnedFd) -> Result<OwnedFd> {
    clone_with(file, OpenTreeFlags::empty())
}

fn clone_with(file: &OwnedFd, flags: OpenTreeFlags) -> Result<OwnedFd> {
    let flags = flags
        | OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    open_tree(file, c"", flags).calling("open_tree")
}

fn attach(clone: &OwnedFd, target: &Path, is_read_only: bool) -> Result<()> {
    let moved =
        move_mount(clone.as_fd(), c"", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH);
    moved.calling("move_mount").at(target)?;
    let read_only = if is_read_only { MountFlags::RDONLY } else { MountFlags::empty() };
    let flags = kept_flags(target)? | MountFlags::BIND | ORDINARY | read_only;
    mount_remount(target, flags, c"").at(target)
}

fn tmpfs(place: &Path, flags: MountFlags, options: &CStr) -> Result<()> {
    mount("tmpfs", place, "tmpfs", flags, options).at(place)
}

/// Whether the mount that contains `path` is read-only, rather than only its file system.
fn is_mounted_read_only(path: &Path) -> Result<bool> {
    if !statvfs(path).at(path)?.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Ok(false);
    }
    let table = mount_table::read()?;
    Ok(mount_table::around(path, &table).is_some_and(Mount::is_read_only))
}

/// Makes a cover read-only.
fn seal(place: &Path) -> Result<()> {
    let mut flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID;
    if place != Path::new("/dev") {
        flags |= MountFlags::NODEV;
    }
    mount_remount(place, flags | kept_flags(place)?, c"").at(place)
}

/// Makes a cover read-only, unless the directory below it is removed meanwhile.
///
/// rmdir(2) takes along what other namespaces have mounted on a directory, a moment before its name
/// is gone: in between, no mount is at the path (EINVAL).
fn seal_cover(place: &Path) -> Result<()> {
    for _ in 0..REMOVAL_MILLISECONDS_MAX {
        match seal(place) {
            Err(Failure { errno: Errno::NOENT, .. }) => return Ok(()),
            Err(Failure { errno: Errno::INVAL, .. }) => sleep(Duration::from_millis(1)),
            sealed => return sealed,
        }
    }
    seal(place)
}

fn make_proc() -> Result<()> {
    mount("proc", "/proc", "proc", SEALED, None).at("/proc")?;
    for name in PROC_READ_ONLY {
        let place = Path::new("/proc").join(name);
        if place.exists() {
            mount_bind_recursive(&place, &place).at(&place)?;
            let flags = MountFlags::BIND | MountFlags::RDONLY | SEALED;
            mount_remount(&place, flags, c"").at(&place)?;
        }
    }
    Ok(())
}

fn mask() -> Result<()> {
    for place in MASKED.map(Path::new) {
        if place.is_dir() {
            mount_bind(EMPTY, place).at(place)?;
        } else if place.exists() {
            cover_file(place)?;
        }
    }
    Ok(())
}

/// Covers a file if it is a socket. The list of sockets may have forged or stale paths.
fn cover_socket(place: &Path) -> Result<()> {
    let file = open_path(place, OFlags::NOFOLLOW)?;
    if FileType::from_raw_mode(fstat(&file)?.st_mode) == FileType::Socket {
        cover_file(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())))?;
    }
    Ok(())
}

/// Covers a file with an empty file that cannot be opened, on the sandbox's read-only /dev.
fn cover_file(place: &Path) -> Result<()> {
    mount_bind(COVER, place).at(place)
}

fn touch(path: &Path) -> Result<()> {
    let mut options = OpenOptions::new();
    options.create(true).write(true).truncate(false).mode(0o444).open(path).map(drop).at(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_socket_is_told_from_the_rest_of_a_name() {
        let line = b"0000000000000000: 00000002 00000000 00010000 0001 01   7153 /run/a b";
        assert_eq!(name_in(line), Some(&b"/run/a b"[..]));
        let unnamed = b"0000000000000000: 00000003 00000000 00000000 0001 03 71530";
        assert_eq!(name_in(unnamed), Some(&b""[..]));
        for rest in
            [&b"Num       RefCount Protocol Flags    Type St Inode Path"[..], b"", b"a: b", b"0:"]
        {
            assert_eq!(name_in(rest), None, "{}", String::from_utf8_lossy(rest));
        }
    }

    #[test]
    fn a_store_and_a_socket_are_what_a_mount_may_call_private() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        assert!(!is_store_or_socket(place.path()));
        fs::write(path("format"), "").unwrap();
        assert!(!is_store_or_socket(place.path()));
        fs::create_dir(path("layers")).unwrap();
        assert!(is_store_or_socket(place.path()));
        std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
        assert!(is_store_or_socket(&path("socket")));
        assert!(!is_store_or_socket(&path("format")));
    }

    #[test]
    fn visible_paths_are_opened_without_following_links() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        fs::create_dir(path("directory")).unwrap();
        fs::write(path("directory/file"), "").unwrap();
        symlink(path("directory"), path("link")).unwrap();
        assert!(open_exactly(place.path(), Path::new("directory/file")).is_ok());
        for name in ["link", "link/file"] {
            let failure = open_exactly(place.path(), Path::new(name)).unwrap_err();
            assert!(matches!(failure.errno, Errno::LOOP | Errno::NOTDIR), "{name}: {failure:?}");
        }
    }
}
