//! Who asks over the control socket, and acting with no more rights than theirs.
//!
//! The daemon may read every file of the base; the base's owner, who may control it, may not (a file of root's in the
//! owner's directory). So content is handed out by a thread that has taken on the rights of the one who asks: on Linux
//! the user and group ids belong to the thread. It ends with the work and never gets them back.

use std::os::unix::net::UnixStream;
use std::thread;

use rustix::fs::{Gid, Uid};

use crate::error::Error;

/// The process at the other end of a connection, as it was when it connected.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Peer {
    uid: Uid,
    gid: Gid,
    groups: Vec<Gid>,
}

impl Peer {
    /// Who connected.
    pub(crate) fn of(stream: &UnixStream) -> std::io::Result<Self> {
        let credentials = rustix::net::sockopt::socket_peercred(stream)?;
        let groups = crate::sys::peer_groups(stream)?.into_iter().map(Gid::from_raw).collect();
        Ok(Self { uid: credentials.uid, gid: credentials.gid, groups })
    }

    /// The user.
    pub(crate) fn uid(&self) -> u32 {
        self.uid.as_raw()
    }

    /// The user and the main group.
    pub(crate) fn ids(&self) -> (u32, u32) {
        (self.uid.as_raw(), self.gid.as_raw())
    }

    /// Whether the user could give a file this owner and group without any privilege.
    pub(crate) fn may_give(&self, uid: u32, gid: u32) -> bool {
        uid == self.uid()
            && (gid == self.gid.as_raw() || self.groups.iter().any(|group| group.as_raw() == gid))
    }

    /// May do what the daemon may.
    pub(crate) fn is_equal(&self) -> bool {
        self.uid.is_root() || self.uid == rustix::process::geteuid()
    }

    /// Runs `work` with the rights of the peer.
    ///
    /// # Errors
    /// `Unsupported` where the daemon cannot take them on; what `work` returns.
    pub(crate) fn act<T: Send>(
        &self,
        work: impl FnOnce() -> Result<T, Error> + Send,
    ) -> Result<T, Error> {
        if self.is_equal() {
            return work();
        }
        let become_peer = || -> rustix::io::Result<()> {
            rustix::thread::set_thread_groups(&self.groups)?;
            rustix::thread::set_thread_res_gid(self.gid, self.gid, self.gid)?;
            // Last: with it all capabilities of the thread go.
            rustix::thread::set_thread_res_uid(self.uid, self.uid, self.uid)
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

    fn nobody() -> Peer {
        Peer { uid: Uid::from_raw(NOBODY), gid: Gid::from_raw(NOBODY), groups: Vec::new() }
    }

    #[test]
    fn work_is_done_with_the_rights_of_the_peer_alone() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let secret = directory.path().join("secret");
        std::fs::write(&secret, "root's").unwrap();
        std::fs::set_permissions(&secret, PermissionsExt::from_mode(0o600)).unwrap();
        let read = || Ok(std::fs::read(&secret).map_err(|error| error.kind()));
        assert_eq!(nobody().act(read).unwrap(), Err(std::io::ErrorKind::PermissionDenied));
        assert!(read().unwrap().is_ok(), "the daemon's own threads keep their rights");
    }

    #[test]
    fn a_user_may_give_files_to_oneself_alone() {
        assert!(nobody().may_give(NOBODY, NOBODY));
        assert!(!nobody().may_give(0, NOBODY));
        assert!(!nobody().may_give(NOBODY, 0));
    }
}
