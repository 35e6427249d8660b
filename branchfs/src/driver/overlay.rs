//! The overlay driver: each branch of main is a kernel overlayfs over `MOUNTPOINT/@name`.
//!
//! Upper directory, lower directory and work directory are the layer's `upper/`, the base, and the layer's `overlay/`.
//! A nested branch is left to the FUSE view: the kernel refuses lower directories that contain one another, as the base
//! contains a parent's layer in the store, and a lower directory that is still mounted as an upper one.
//!
//! The driver needs `index`, `redirect_dir` and `metacopy` from the kernel. Without the index, hard links of the base
//! would be broken up; the kernel silently drops it without `CAP_DAC_READ_SEARCH`.

use std::collections::HashMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::covers::Covers;
use super::held_writers::HeldWriters;
use super::proc_fds;
use branchfs_core::driver::Driver;
use branchfs_core::error::{Context, Error};
use branchfs_core::ids::{BranchId, SCRATCH, directory_name};
use branchfs_core::mount_table;
use branchfs_core::overlayfs_mount::{KernelMount, Layers, unmount};
use branchfs_core::overlayfs_upper::NormaliseFor;
use branchfs_core::overlayfs_upper::{
    give_work_to, mount_over, open_directory, pending_conversion, tree_of,
};
use branchfs_core::ownership;
use branchfs_core::rooted_dir::remove_path;
use branchfs_core::scheduling::{lower_priority, wait_for_reply};
use branchfs_core::view::HIDDEN;

/// How long a commit or a fork waits for files that are being closed.
const WRITERS_WAIT_MAX: Duration = Duration::from_secs(1);

/// How long they wait before files can no longer be opened for writing by their paths.
const COVER_AFTER: Duration = Duration::from_millis(100);

/// How long they wait before files that are written are covered one by one.
const COVER_FILES_AFTER: Duration = Duration::from_millis(200);

/// How long they wait before processes that write in the branch nevertheless are held.
const HOLD_AFTER: Duration = Duration::from_millis(400);

/// How long they wait after a file was covered, or a process held: those that are open drain, and the next search may find
/// another one.
const PROGRESS_WAIT_MAX: Duration = Duration::from_millis(500);

/// How long they wait in all where files are covered, and processes held, one after the other.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// The longest pause between two attempts to stop all writing.
///
/// An attempt succeeds only if no file is open for writing in that instant. Programs that open and close files all the
/// time leave such instants, but short ones, so there must be many attempts. Pauses of different lengths keep the attempts
/// from hitting a writer at the same point of its loop each time, and leave the processor to writers that wait to close.
const ATTEMPT_PAUSE_MAX_NANOS: u64 = 50_000;

/// How long a refused commit or fork searches for open files, if it finds none the first time.
const SEARCH_MAX: Duration = Duration::from_millis(500);

/// How often a branch is normalised again because of renames meanwhile.
const ROUNDS_MAX: usize = 5;

/// A branch whose overlayfs is mounted below the mountpoint, or a stale one, whose overlayfs was.
#[derive(Clone, Debug)]
struct Presented {
    name: String,
    mount: Arc<KernelMount>,
    is_frozen: bool,
    /// It is stale: its directory is unmounted.
    is_hidden: bool,
}

/// The driver of one mount.
#[derive(Debug)]
pub(crate) struct Overlay {
    base: PathBuf,
    store: PathBuf,
    mountpoint: PathBuf,
    /// Leaf lock, never held over a system call that may wait for the mount.
    presented: Mutex<HashMap<BranchId, Presented>>,
    /// Shared while a read-only mount may cover a branch, exclusive while branches are uncovered for the unmount.
    covers: RwLock<()>,
}

impl Overlay {
    pub(crate) fn new(base: &Path, store: &Path, mountpoint: &Path) -> Self {
        Self {
            base: base.to_path_buf(),
            store: store.to_path_buf(),
            mountpoint: mountpoint.to_path_buf(),
            presented: Mutex::default(),
            covers: RwLock::default(),
        }
    }

    fn table(&self) -> MutexGuard<'_, HashMap<BranchId, Presented>> {
        // Each use inserts, removes or sets one entry: nothing is half-done when one panics.
        self.presented.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn presented(&self, branch: BranchId) -> Option<Presented> {
        self.table().get(&branch).cloned()
    }

    fn set_frozen(&self, branch: BranchId, is_frozen: bool) {
        if let Some(presented) = self.table().get_mut(&branch) {
            presented.is_frozen = is_frozen;
        }
    }

    fn layer(&self, branch: BranchId) -> PathBuf {
        self.store.join("layers").join(branch.to_string())
    }

    fn directory(&self, name: &str) -> PathBuf {
        self.mountpoint.join(directory_name(name))
    }

    fn make(&self, branch: BranchId, name: &str) -> Result<KernelMount, Error> {
        mount_over(&self.base, &self.layer(branch)).map_err(|error| match error {
            Error::Io { source, .. } if source.raw_os_error() == Some(libc::EBUSY) => {
                let users = mount_table::users_of_upper(&self.layer(branch).join("upper"));
                let users = users.iter().map(|(pid, name)| format!(" {pid} ({name})"));
                let users = users.collect::<Vec<_>>().join(",");
                Error::Unsupported(format!(
                    "branch {name} is still in use by processes of an earlier mount: end them, then mount again{}{users}",
                    if users.is_empty() { "" } else { "; in other mount namespaces:" }
                ))
            }
            error => error,
        })
    }

    /// Attempts to stop all writing, `false` if none has succeeded.
    ///
    /// The kernel stops it only in an instant in which no file is open for writing, and the more programs open and close
    /// files all the time, the rarer such an instant is. So after a while read-only mounts cover the branch and files that are
    /// written, and after another while the processes that are still writing are held.
    fn freeze_patiently(
        &self,
        branch: BranchId,
        Presented { name, mount, is_hidden, .. }: &Presented,
        completion: NormaliseFor,
    ) -> Result<bool, Error> {
        let base = open_directory(&self.base)?;
        let _covers = self.covers.read().unwrap_or_else(PoisonError::into_inner);
        let start = Instant::now();
        let mut deadline = start + WRITERS_WAIT_MAX;
        let (mut covers, mut held) = (None, None);
        let mut rounds = 0;
        loop {
            match self.try_freeze(branch, mount, &base, completion) {
                Ok(true) => return Ok(true),
                Ok(false) if rounds < ROUNDS_MAX => rounds += 1,
                Ok(false) => return Ok(false),
                Err(Error::Io { source, .. }) if source.raw_os_error() == Some(libc::EBUSY) => {
                    if Instant::now() >= deadline {
                        return Ok(false);
                    }
                    if start.elapsed() >= COVER_AFTER && covers.is_none() && !is_hidden {
                        covers = Some(Covers::new(&self.directory(name))?);
                    }
                    let covers = covers.as_mut().filter(|_| start.elapsed() >= COVER_FILES_AFTER);
                    let has_covered =
                        covers.is_some_and(|covers| covers.cover_written(&self.layer(branch)));
                    if start.elapsed() >= HOLD_AFTER && held.is_none() {
                        held = Some(HeldWriters::hold(mount.root()).at(self.layer(branch))?);
                    }
                    let has_held = held.as_ref().is_some_and(HeldWriters::has_held_more);
                    if has_covered || has_held {
                        let later = (Instant::now() + PROGRESS_WAIT_MAX).max(deadline);
                        deadline = later.min(start + WAIT_MAX);
                    }
                    thread::sleep(Duration::from_nanos(fastrand::u64(..=ATTEMPT_PAUSE_MAX_NANOS)));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// One attempt to stop all writing with the layer in good form; `false` asks for another one.
    fn try_freeze(
        &self,
        branch: BranchId,
        mount: &KernelMount,
        base: &OwnedFd,
        completion: NormaliseFor,
    ) -> Result<bool, Error> {
        let layer = self.layer(branch);
        mount.set_read_only(true).at(&layer)?;
        let thaw = |error: Error| match mount.set_read_only(false) {
            Ok(()) => error,
            Err(second) => Error::Corrupt(format!("{error}; the branch stays read-only: {second}")),
        };
        let pending = pending_conversion(&layer, base, completion, mount).map_err(thaw)?;
        if pending.is_empty() {
            return Ok(true);
        }
        mount.set_read_only(false).at(&layer)?;
        pending.convert(&layer, &tree_of(mount).at(&layer)?)?;
        Ok(false)
    }

    /// The files that are open for writing, or deleted and still open, and the processes that have them open. If there
    /// are none, the processes that use the branch. One search may miss files that are opened and closed all the time.
    fn find_blocking(&self, branch: BranchId, mount: &KernelMount) -> (Vec<PathBuf>, Vec<String>) {
        let upper = self.layer(branch).join("upper");
        let deadline = Instant::now() + SEARCH_MAX;
        loop {
            let found = proc_fds::blocking(mount.root());
            if !found.is_empty() {
                return proc_fds::paths_and_users(found);
            }
            // The search before may have taken long.
            let paths = proc_fds::written_in(&upper, Instant::now() + SEARCH_MAX);
            if !paths.is_empty() {
                return (paths, Vec::new());
            }
            if Instant::now() >= deadline {
                break;
            }
        }
        let found = proc_fds::mapped_and_deleted(mount.root());
        if found.is_empty() {
            return (Vec::new(), proc_fds::users(mount.root()));
        }
        proc_fds::paths_and_users(found)
    }

    /// Unmounts a branch's directory; it must not show the branch any more.
    fn uncover(&self, name: &str) {
        const ATTEMPTS_MAX: usize = 3;
        let directory = self.directory(name);
        for _ in 0..ATTEMPTS_MAX {
            match unmount(&directory, true) {
                // The kernel may have taken it away already, with the name in the mount.
                Ok(()) | Err(Errno::INVAL | Errno::NOENT) => return,
                Err(error) => {
                    tracing::error!("{} cannot be unmounted: {error}", directory.display());
                }
            }
        }
    }

    fn refuse_own_store(&self, branch: BranchId) -> Result<(), Error> {
        let hidden = self.layer(branch).join("upper").join(HIDDEN);
        match fs::symlink_metadata(&hidden) {
            Ok(found) if found.rdev() != 0 || !is_character_device(&found) => {
                Err(Error::Unsupported(format!(
                    "the branch has a {HIDDEN} of its own, which is the store's name: remove or rename it"
                )))
            }
            _ => Ok(()),
        }
    }
}

impl Driver for Overlay {
    fn name(&self) -> &'static str {
        "overlay"
    }

    fn is_for(&self, is_by_kernel: Option<bool>) -> bool {
        is_by_kernel != Some(false) // what we wrote has no marks that the kernel would know it by
    }

    fn serves(&self, branch: BranchId) -> bool {
        self.table().get(&branch).is_some_and(|presented| !presented.is_hidden)
    }

    fn attach(&self, branch: BranchId, name: &str) -> Result<(), Error> {
        let mount = Arc::new(self.make(branch, name)?);
        let directory = self.directory(name);
        mount.attach(&directory).at(&directory)?;
        let name = name.to_owned();
        let presented = Presented { name, mount, is_frozen: false, is_hidden: false };
        self.table().insert(branch, presented);
        Ok(())
    }

    fn convert(&self, branch: BranchId) -> Result<(), Error> {
        let Some(Presented { mount, is_frozen: false, .. }) = self.presented(branch) else {
            return Ok(()); // it is normalised, or not presented by this driver
        };
        let layer = self.layer(branch);
        let base = open_directory(&self.base)?;
        let pending = pending_conversion(&layer, &base, NormaliseFor::ForCommit, &mount)?;
        pending.convert(&layer, &tree_of(&mount).at(&layer)?)
    }

    fn freeze(&self, branch: BranchId, completion: NormaliseFor) -> Result<(), Error> {
        let Some(presented) = self.presented(branch).filter(|one| !one.is_frozen) else {
            return Ok(());
        };
        self.refuse_own_store(branch)?;
        if !self.freeze_patiently(branch, &presented, completion)? {
            let (paths, users) = self.find_blocking(branch, &presented.mount);
            return Err(Error::Busy { name: presented.name, paths, users });
        }
        self.set_frozen(branch, true);
        Ok(())
    }

    fn thaw(&self, branch: BranchId) -> Result<(), Error> {
        let Some(Presented { mount, is_frozen: true, .. }) = self.presented(branch) else {
            return Ok(());
        };
        mount.set_read_only(false).at(self.layer(branch))?;
        self.set_frozen(branch, false);
        Ok(())
    }

    fn frozen(&self) -> Vec<BranchId> {
        let table = self.table();
        table.iter().filter(|(_, presented)| presented.is_frozen).map(|(id, _)| *id).collect()
    }

    fn hide(&self, branch: BranchId) {
        let Some(presented) = self.presented(branch).filter(|one| !one.is_hidden) else { return };
        self.uncover(&presented.name);
        if let Some(presented) = self.table().get_mut(&branch) {
            presented.is_hidden = true;
        }
    }

    fn detach(&self, branch: BranchId) {
        let Some(presented) = self.table().remove(&branch) else { return };
        if !presented.is_hidden {
            self.uncover(&presented.name);
        }
        // Closing the last descriptor ends the file system, which syncs: done in the background.
        let end = move || {
            lower_priority();
            wait_for_reply();
            drop(presented);
        };
        let _ = thread::Builder::new().name("detach".to_owned()).spawn(end);
    }

    fn release(&self, then: &dyn Fn() -> Result<(), Error>) -> Result<(), Error> {
        let _covers = self.covers.write().unwrap_or_else(PoisonError::into_inner);
        let presented: Vec<Presented> =
            self.table().values().filter(|one| !one.is_hidden).cloned().collect();
        let mut uncovered = Vec::new();
        let mut uncover = || {
            for one in &presented {
                let directory = self.directory(&one.name);
                match unmount(&directory, false) {
                    Ok(()) => uncovered.push(one),
                    Err(Errno::BUSY) => return Err(Error::InUse(one.name.clone())),
                    Err(error) => return Err(error).at(&directory),
                }
            }
            then()
        };
        let done = uncover();
        if done.is_err() {
            for one in uncovered {
                let directory = self.directory(&one.name);
                one.mount.attach(&directory).at(&directory)?;
            }
        }
        done
    }
}

fn is_character_device(found: &fs::Metadata) -> bool {
    std::os::unix::fs::FileTypeExt::is_char_device(&found.file_type())
}

/// Whether the kernel gives all that is asked for over this base and store: it is tried, at the mountpoint that is still
/// an ordinary directory, and read back from the table of mounts. The reason where not. On a full file system nothing can
/// be found out: the kernel then gives less than it could.
pub(crate) fn probe(base: &Path, store: &Path, mountpoint: &Path) -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("only root may mount it".to_owned());
    }
    let scratch = store.join(SCRATCH);
    let tried =
        try_options(base, &scratch, mountpoint).and_then(|options| refuse_missing(&options));
    let is_full = tried.is_err() && !has_room(&scratch);
    let removed = remove_path(&scratch).at(&scratch).map_err(|error| error.to_string());
    if is_full {
        return Err("the probe failed: no space left on the store's file system; free space, and \
            the next mount tries it again"
            .to_owned());
    }
    tried.and(removed)
}

fn refuse_missing(options: &str) -> Result<(), String> {
    let lacks = |option: &&str| !options.split(',').any(|given| given == *option);
    let missing: Vec<_> =
        ["index=on", "redirect_dir=on", "metacopy=on"].into_iter().filter(lacks).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let capability = if may_open_by_handle() {
        "the file system cannot do it"
    } else {
        "the capability DAC_READ_SEARCH is missing: docker run --cap-add DAC_READ_SEARCH"
    };
    Err(format!("the kernel does not support {} here ({capability})", missing.join(", ")))
}

/// Whether a directory and a file with content can be made in a directory that may not be there yet.
fn has_room(scratch: &Path) -> bool {
    let room = scratch.join("room");
    let made = fs::create_dir_all(&room).and_then(|()| fs::write(room.join("file"), [0; 4096]));
    !made.is_err_and(|error| matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)))
}

fn try_options(base: &Path, scratch: &Path, mountpoint: &Path) -> Result<String, String> {
    let (upper, work) = (scratch.join("upper"), scratch.join("work"));
    let parent = scratch.parent().expect("it is in the store");
    let said = |error: Error| error.to_string();
    let owner = ownership::of_directory(parent).at(parent).map_err(said)?;
    for directory in [scratch, &upper, &work] {
        ownership::make_directory(directory, owner).at(directory).map_err(said)?;
    }
    let mount =
        KernelMount::make(Layers { lower: base, upper: &upper, work: &work }).map_err(refusal)?;
    // A container that is killed at this moment leaves it to the owner.
    give_work_to(&work, owner).map_err(said)?;
    mount.attach(mountpoint).map_err(refusal)?;
    let table = mount_table::read();
    unmount(mountpoint, true).map_err(refusal)?;
    let table = table.map_err(|error| error.to_string())?;
    let found = table.into_iter().rev().find(|entry| entry.point == mountpoint);
    Ok(found.map(|entry| entry.options).unwrap_or_default())
}

fn refusal(error: Errno) -> String {
    match error {
        Errno::PERM => "mounting is not permitted (docker run --cap-add SYS_ADMIN)".to_owned(),
        Errno::NODEV => "the kernel has no overlayfs (modprobe overlay)".to_owned(),
        Errno::NOSYS => "the kernel has no fsopen: Linux 6.5 is needed".to_owned(),
        Errno::INVAL => {
            "the store's file system cannot carry it, or the kernel is older than Linux 6.5"
                .to_owned()
        }
        error => format!("the kernel says {error}"),
    }
}

fn may_open_by_handle() -> bool {
    const DAC_READ_SEARCH: u32 = 2;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask >> DAC_READ_SEARCH & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cut short where it attaches what it has mounted: the mountpoint is missing.
    #[test]
    fn files_left_by_an_interrupted_probe_belong_to_the_owner() {
        let base = tempfile::tempdir().unwrap();
        let store = base.path().join(HIDDEN);
        fs::create_dir(&store).unwrap();
        std::os::unix::fs::chown(&store, Some(1000), Some(1000)).unwrap();
        let scratch = store.join(SCRATCH);
        try_options(base.path(), &scratch, &store.join("missing")).unwrap_err();
        let found = ["", "upper", "work", "work/work", "work/index"].map(|name| {
            let status = fs::metadata(scratch.join(name)).unwrap();
            (name, status.uid(), status.gid())
        });
        assert_eq!(found, found.map(|(name, ..)| (name, 1000, 1000)));
    }
}
