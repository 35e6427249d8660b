//! The credentials of another process, and how to act with its rights.
//!
//! The daemon can read every file of the base. The owner of the base, who may control the daemon, cannot: the directory
//! may contain files of root. So a thread that has taken on the ids of the peer reads the content that the peer asks for.
//! On Linux, user and group ids belong to a thread. The thread ends with its work and never regains the daemon's ids.

use std::thread;

use rustix::fs::{Gid, Uid};

use crate::error::Error;

/// The user, group and supplementary groups of a process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Credentials {
    uid: Uid,
    gid: Gid,
    groups: Vec<Gid>,
}

impl Credentials {
    /// Returns credentials with these ids.
    #[must_use]
    pub fn new(uid: Uid, gid: Gid, groups: Vec<Gid>) -> Self {
        Self { uid, gid, groups }
    }

    /// The user id.
    pub(crate) fn uid(&self) -> u32 {
        self.uid.as_raw()
    }

    /// The user id and the primary group id.
    pub fn ids(&self) -> (u32, u32) {
        (self.uid.as_raw(), self.gid.as_raw())
    }

    /// Whether the user could give a file this owner and group without privileges.
    pub(crate) fn may_chown_to(&self, uid: u32, gid: u32) -> bool {
        uid == self.uid()
            && (gid == self.gid.as_raw() || self.groups.iter().any(|group| group.as_raw() == gid))
    }

    /// Whether the peer may do everything that the daemon may.
    pub fn is_privileged(&self) -> bool {
        self.uid.is_root() || self.uid == rustix::process::geteuid()
    }

    /// Runs `work` with the rights of the peer.
    ///
    /// # Errors
    /// `Unsupported` if the daemon cannot take on the rights; the errors of `work`.
    pub fn run_as<T: Send>(
        &self,
        work: impl FnOnce() -> Result<T, Error> + Send,
    ) -> Result<T, Error> {
        if self.is_privileged() {
            return work();
        }
        let become_peer = || -> rustix::io::Result<()> {
            rustix::thread::set_thread_groups(&self.groups)?;
            rustix::thread::set_thread_res_gid(self.gid, self.gid, self.gid)?;
            // Last: with it all capabilities of the thread go. The real and the saved user stay, so that the peer cannot send
            // signals to the thread, which would end the daemon.
            let own = rustix::process::getuid();
            rustix::thread::set_thread_res_uid(own, self.uid, own)
        };
        thread::scope(|scope| {
            let worker = thread::Builder::new().name("peer".to_owned()).spawn_scoped(scope, || {
                become_peer().map_err(|error| {
                    Error::Unsupported(format!(
                        "the daemon cannot act for user {}: {error}; nothing was read",
                        self.uid()
                    ))
                })?;
                work()
            });
            match worker {
                Ok(worker) => {
                    worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                }
                Err(error) => Err(Error::Unsupported(format!("no thread can be started: {error}"))),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const NOBODY: u32 = 65_534;

    fn nobody() -> Credentials {
        Credentials { uid: Uid::from_raw(NOBODY), gid: Gid::from_raw(NOBODY), groups: Vec::new() }
    }

    #[test]
    fn work_is_done_with_the_rights_of_the_peer_alone() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let secret = directory.path().join("secret");
        std::fs::write(&secret, "root's").unwrap();
        std::fs::set_permissions(&secret, PermissionsExt::from_mode(0o600)).unwrap();
        let read = || Ok(std::fs::read(&secret).map_err(|error| error.kind()));
        assert_eq!(nobody().run_as(read).unwrap(), Err(std::io::ErrorKind::PermissionDenied));
        assert!(read().unwrap().is_ok(), "the daemon's own threads keep their rights");
    }

    #[test]
    fn a_user_may_give_files_to_oneself_alone() {
        assert!(nobody().may_chown_to(NOBODY, NOBODY));
        assert!(!nobody().may_chown_to(0, NOBODY));
        assert!(!nobody().may_chown_to(NOBODY, 0));
    }

    #[test]
    fn the_peer_cannot_signal_the_thread_that_acts_for_it() {
        use std::os::unix::process::CommandExt;
        let may_signal = |thread| {
            let mut kill = std::process::Command::new("sh");
            kill.args(["-c", &format!("kill -0 {thread}")])
                .uid(NOBODY)
                .gid(NOBODY)
                .stderr(std::process::Stdio::null());
            kill.status().unwrap().success()
        };
        let (send, receive) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || {
                let work = move || {
                    send.send(rustix::thread::gettid().as_raw_nonzero()).unwrap();
                    let _ = ended.recv();
                    Ok(())
                };
                nobody().run_as(work).unwrap();
            });
            assert!(!may_signal(receive.recv().unwrap()));
            drop(end);
        });
    }
}
