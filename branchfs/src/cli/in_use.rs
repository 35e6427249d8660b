//! The locks of branches in which something runs: such a branch is neither committed nor rebased.
//!
//! ```text
//! STORE/agents/using-7    of the branch with the number 7; empty
//! ```
//!
//! The library `branching` makes them: a program that runs something in a branch holds the file's lock shared, one
//! that commits or rebases the branch holds it alone. The kernel releases a lock when its process ends. The last holder
//! removes the file while it holds the lock alone, so a lock counts only if the file is still at its path.

use std::fs::File;
use std::os::unix::fs::{MetadataExt, lchown};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use branchfs::protocol::{self, BranchRef};
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::client;

/// How long to wait for a lock: the last holder of the shared lock holds it alone while it removes the file.
const RELEASE_TIME_MAX: Duration = Duration::from_millis(200);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Nothing can be started in the branch while this exists.
pub(crate) struct ExclusiveLock {
    file: File,
    path: PathBuf,
}

/// Locks a branch that no program is running in. `what` names the refused action: "committed".
///
/// Returns `None` if the file cannot be created: the user cannot write to the store, and so cannot commit either, or
/// the disk is full. No process holds the lock then, since its file would exist.
///
/// # Errors
/// A program runs in the branch, or the lock is not a regular file.
pub(crate) fn lock_exclusively(
    mountpoint: &Path,
    branch: &BranchRef,
    what: &str,
) -> Result<Option<ExclusiveLock>> {
    let info = client::request(mountpoint, protocol::Info {})?;
    let branches = client::request(mountpoint, protocol::List {})?.branches;
    let Some(found) = branches.iter().find(|each| match branch {
        BranchRef::Name(name) => each.name == *name,
        BranchRef::Id(id) => each.id == *id,
    }) else {
        return Ok(None); // the request itself says that there is no such branch
    };
    let agents = info.store.0.join("agents");
    let path = agents.join(format!("using-{}", found.id));
    let deadline = Instant::now() + RELEASE_TIME_MAX;
    loop {
        let owner = rustix::process::geteuid().is_root().then_some((info.uid, info.gid));
        let file = match open(&agents, &path, owner) {
            Ok(file) => file,
            Err(Errno::ACCESS | Errno::ROFS | Errno::NOSPC | Errno::DQUOT) => return Ok(None),
            Err(Errno::NOENT) if Instant::now() < deadline => continue, // the last holder removed it
            Err(error) => {
                return Err(error).with_context(|| {
                    format!(
                        "the lock of branch {} cannot be opened: {}",
                        found.name,
                        path.display()
                    )
                });
            }
        };
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) if is_at(&file, &path) => return Ok(Some(ExclusiveLock { file, path })),
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) if Instant::now() > deadline => bail!(
                "branch {:?} was not {what}: {} runs something in it. Nothing was changed\n\
                 Hint: wait for its end or stop it, then try again; branchfs abort drops the branch",
                found.name,
                holder(&file).unwrap_or_else(|| "another process".to_owned()),
            ),
            Err(Errno::WOULDBLOCK) => {}
            Err(error) => return Err(error.into()),
        }
        sleep(POLL_INTERVAL);
    }
}

fn open(agents: &Path, path: &Path, owner: Option<(u32, u32)>) -> rustix::io::Result<File> {
    match rustix::fs::mkdir(agents, Mode::RWXU) {
        Ok(()) => {
            if let Some((uid, gid)) = owner {
                let _ = lchown(agents, Some(uid), Some(gid)); // it is removed with the lock
            }
        }
        Err(Errno::EXIST) => {}
        Err(error) => return Err(error),
    }
    let flags = OFlags::RDWR
        | OFlags::CREATE
        | OFlags::NOFOLLOW
        | OFlags::NONBLOCK
        | OFlags::CLOEXEC
        | OFlags::NOCTTY;
    let mode = Mode::RUSR | Mode::WUSR;
    Ok(rustix::fs::openat2(CWD, path, flags, mode, ResolveFlags::NO_SYMLINKS)?.into())
}

fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), path.symlink_metadata()) {
        (Ok(opened), Ok(found)) => opened.dev() == found.dev() && opened.ino() == found.ino(),
        _ => false,
    }
}

/// Returns the process that holds the lock, if the kernel reports it.
fn holder(file: &File) -> Option<String> {
    let inode = format!(":{}", file.metadata().ok()?.ino());
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    let rows = locks.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let pid = rows
        .filter(|row| row.get(1) == Some(&"FLOCK"))
        .find(|row| row.get(5).is_some_and(|at| at.ends_with(&inode)))
        .and_then(|row| row.get(4).map(|pid| (*pid).to_owned()))?;
    Some(format!("process {pid}"))
}

impl Drop for ExclusiveLock {
    fn drop(&mut self) {
        if is_at(&self.file, &self.path) {
            let _ = std::fs::remove_file(&self.path);
            if let Some(agents) = self.path.parent() {
                let _ = std::fs::remove_dir(agents); // unless other locks are in it
            }
        }
    }
}
