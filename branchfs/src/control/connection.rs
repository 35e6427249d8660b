//! A connection to the control socket: its peer, its request lines and their limits.
//!
//! The daemon rejects a peer of another user before it reads anything. An admitted peer may keep an idle connection open.
//! A request line, once begun, must be complete within [`LINE_WAIT_MAX`] and have at most [`REQUEST_BYTES_MAX`], because
//! each connection occupies a thread. Each user has a limited number of slots. When a user's slots are used up, a new
//! connection takes the slot of the connection that has been idle longest, so idle connections never lock a user out.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::fd_passing::Socket;
use branchfs_core::credentials::Credentials;
use branchfs_core::descriptors::admit_connection;
use branchfs_core::error::Error;
use rustix::fs::Gid;

/// The maximum length of a request line, in bytes.
pub(super) const REQUEST_BYTES_MAX: usize = 1 << 20;

/// How many connections a user may have; fewer if the daemon may open few files. At most three users are admitted: root,
/// the daemon's user and the owner of the base.
pub(super) const CONNECTIONS_MAX: usize = 512;

/// The maximum time from the first byte of a request line to its last.
const LINE_WAIT_MAX: Duration = Duration::from_secs(10);

/// The maximum time to wait for a peer that does not read its reply.
const REPLY_WAIT_MAX: Duration = Duration::from_secs(30);

/// The open connections of all users, which [`CONNECTIONS_MAX`] limits for each user.
#[derive(Clone, Debug, Default)]
pub(super) struct ConnectionSlots(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    open: Vec<Open>,
    next: u64,
}

/// One open connection.
#[derive(Debug)]
struct Open {
    number: u64,
    uid: u32,
    stream: Arc<UnixStream>,
    /// When the connection became idle; `None` while a request is carried out.
    idle_since: Option<Instant>,
}

/// The slot of one connection, released on drop.
#[derive(Debug)]
pub(super) struct ConnectionSlot {
    slots: ConnectionSlots,
    number: u64,
}

impl ConnectionSlots {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a slot for a connection of a user. If the user has none left, takes that of the connection that has been idle
    /// longest. That connection is shut down for reading: requests that have arrived are still answered, and the peer
    /// cannot send any more. `None` if all connections of the user are busy.
    pub(super) fn take(&self, uid: u32, stream: &Arc<UnixStream>) -> Option<ConnectionSlot> {
        let mut table = self.table();
        let taken = table.open.iter().filter(|open| open.uid == uid).count();
        if taken >= CONNECTIONS_MAX || admit_connection().is_err() {
            let own = table.open.iter().enumerate().filter(|(_, open)| open.uid == uid);
            let idle = own.filter_map(|(index, open)| Some((open.idle_since?, index)));
            let (_, longest) = idle.min()?;
            let given_up = table.open.swap_remove(longest);
            let _ = given_up.stream.shutdown(Shutdown::Read); // the peer may have gone
        }
        let number = table.next;
        table.next += 1;
        let idle_since = Some(Instant::now());
        table.open.push(Open { number, uid, stream: Arc::clone(stream), idle_since });
        Some(ConnectionSlot { slots: self.clone(), number })
    }
}

impl ConnectionSlot {
    /// Records that a request has begun (`false`) or has been answered (`true`).
    fn set_idle(&self, is_idle: bool) {
        let mut table = self.slots.table();
        if let Some(open) = table.open.iter_mut().find(|open| open.number == self.number) {
            open.idle_since = is_idle.then(Instant::now);
        }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.slots.table().open.retain(|open| open.number != self.number);
    }
}

/// The connections of rejected peers. If a connection were closed immediately, a peer that has yet to send its request
/// would get a broken pipe instead of the error. So the last few connections stay half open, without a thread.
#[derive(Debug, Default)]
pub(super) struct RejectedPeers(VecDeque<Arc<UnixStream>>);

impl RejectedPeers {
    /// How many connections stay half open.
    const KEPT_MAX: usize = 64;

    /// Sends the error reply to a peer that is rejected.
    pub(super) fn reject(&mut self, stream: Arc<UnixStream>, reply: &str) {
        // The buffer of a new socket has room for a line. A peer that has disconnected needs no reply.
        let _ = (&*stream).write_all(reply.as_bytes());
        let _ = stream.shutdown(Shutdown::Write);
        self.0.push_back(stream);
        if self.0.len() > Self::KEPT_MAX {
            self.0.pop_front();
        }
    }
}

/// The result of reading a line.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Line {
    /// A complete line, without its line feed.
    Whole(Vec<u8>),
    /// A line that was too long, too slow or incomplete. The next line cannot be found.
    Broken,
    /// The peer has disconnected.
    End,
}

/// A connection of an admitted peer.
#[derive(Debug)]
pub(super) struct Connection<'s> {
    stream: &'s UnixStream,
    reader: BufReader<Socket<'s>>,
    /// The process that connected.
    pub(super) peer: Credentials,
    slot: ConnectionSlot,
    line_wait_max: Duration,
}

impl<'s> Connection<'s> {
    pub(super) fn new(stream: &'s UnixStream, slot: ConnectionSlot) -> io::Result<Self> {
        stream.set_write_timeout(Some(REPLY_WAIT_MAX))?;
        let reader = BufReader::new(Socket::new(stream));
        Ok(Self {
            stream,
            reader,
            peer: credentials_of(stream)?,
            slot,
            line_wait_max: LINE_WAIT_MAX,
        })
    }

    /// Takes the descriptor that came with the request.
    pub(super) fn descriptor(&mut self, what: &str) -> Result<OwnedFd, Error> {
        self.reader.get_mut().descriptor().ok_or_else(|| {
            Error::Usage(format!("the request has no descriptor {what} (SCM_RIGHTS)"))
        })
    }

    /// Waits for the next request line. From its first byte on, the peer has [`LINE_WAIT_MAX`] to send it.
    pub(super) fn read(&mut self) -> io::Result<Line> {
        if self.reader.buffer().is_empty() {
            // A descriptor comes with bytes of its request, so these are of requests that were answered without them.
            self.reader.get_mut().discard_descriptors();
        }
        let mut line = Vec::new();
        let mut deadline = None;
        self.slot.set_idle(true);
        loop {
            let arrived = match self.reader.fill_buf() {
                Ok(arrived) => arrived,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Line::Broken),
                Err(error) => return Err(error),
            };
            self.slot.set_idle(false);
            if arrived.is_empty() {
                return Ok(if line.is_empty() { Line::End } else { Line::Broken });
            }
            let end = arrived.iter().position(|byte| *byte == b'\n');
            let taken = end.unwrap_or(arrived.len());
            line.extend_from_slice(&arrived[..taken]);
            self.reader.consume(end.map_or(taken, |end| end + 1));
            if line.len() >= REQUEST_BYTES_MAX {
                return Ok(Line::Broken);
            }
            if end.is_some() {
                if deadline.is_some() {
                    self.stream.set_read_timeout(None)?;
                }
                return Ok(Line::Whole(line));
            }
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + self.line_wait_max);
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Line::Broken);
            }
            self.stream.set_read_timeout(Some(left))?;
        }
    }

    /// Sends a reply line. Fails if the peer does not read it within [`REPLY_WAIT_MAX`].
    pub(super) fn write(&mut self, reply: &str) -> io::Result<()> {
        self.stream.write_all(reply.as_bytes())
    }
}

/// Returns the credentials of the process at the other end of a stream, as they were when it connected.
fn credentials_of(stream: &UnixStream) -> std::io::Result<Credentials> {
    let peer = rustix::net::sockopt::socket_peercred(stream)?;
    let groups = crate::sys::peer_groups(stream)?.into_iter().map(Gid::from_raw).collect();
    Ok(Credentials::new(peer.uid, peer.gid, groups))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
    use std::mem::MaybeUninit;
    use std::os::fd::{AsFd, BorrowedFd};

    fn connected(line_wait_max: Duration, check: impl FnOnce(&mut Connection<'_>, UnixStream)) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let ours = Arc::new(ours);
        let slot = ConnectionSlots::default().take(0, &ours).unwrap();
        let mut connection = Connection { line_wait_max, ..Connection::new(&ours, slot).unwrap() };
        check(&mut connection, theirs);
    }

    const PATIENT: Duration = Duration::from_secs(60);

    #[test]
    fn lines_come_whole_however_they_are_cut() {
        connected(PATIENT, |connection, mut peer| {
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    for piece in ["on", "e\ntwo\nthr", "e", "e\n\nun"] {
                        peer.write_all(piece.as_bytes()).unwrap();
                    }
                });
                for wanted in ["one", "two", "three", ""] {
                    assert_eq!(connection.read().unwrap(), Line::Whole(wanted.into()));
                }
                assert_eq!(connection.read().unwrap(), Line::Broken);
            });
            assert_eq!(connection.read().unwrap(), Line::End);
        });
    }

    #[test]
    fn a_descriptor_is_never_taken_for_one_of_a_later_request() {
        connected(PATIENT, |connection, peer| {
            let file = std::fs::File::open("/dev/null").unwrap();
            let send = |line: &[u8], files: &[BorrowedFd<'_>]| {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut ancillary = SendAncillaryBuffer::new(&mut space);
                if !files.is_empty() {
                    ancillary.push(SendAncillaryMessage::ScmRights(files));
                }
                let line = [io::IoSlice::new(line)];
                rustix::net::sendmsg(&peer, &line, &mut ancillary, SendFlags::empty()).unwrap();
            };
            send(b"refused\n", &[file.as_fd()]);
            assert_eq!(connection.read().unwrap(), Line::Whole("refused".into()));
            send(b"without\n", &[]);
            assert_eq!(connection.read().unwrap(), Line::Whole("without".into()));
            assert!(connection.descriptor("").is_err());
            // Two requests that arrive together: the second one keeps its descriptor.
            send(b"first\n", &[]);
            send(b"second\n", &[file.as_fd()]);
            assert_eq!(connection.read().unwrap(), Line::Whole("first".into()));
            assert_eq!(connection.read().unwrap(), Line::Whole("second".into()));
            assert!(connection.descriptor("").is_ok());
        });
    }

    #[test]
    fn a_line_that_never_ends_is_given_up() {
        connected(Duration::from_millis(20), |connection, mut peer| {
            peer.write_all(b"{").unwrap();
            assert_eq!(connection.read().unwrap(), Line::Broken);
        });
    }

    #[test]
    fn a_line_that_drips_is_given_up_too() {
        connected(Duration::from_millis(20), |connection, mut peer| {
            // Until it fails, because the connection is closed; each byte comes well within the time of one read.
            let dripping = std::thread::spawn(move || {
                while peer.write_all(b" ").is_ok() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            assert_eq!(connection.read().unwrap(), Line::Broken);
            connection.stream.shutdown(Shutdown::Both).unwrap();
            dripping.join().unwrap();
        });
    }

    #[test]
    fn a_line_that_is_too_long_is_given_up() {
        connected(PATIENT, |connection, mut peer| {
            let sending = std::thread::spawn(move || {
                let _ = peer.write_all(&vec![b'x'; 2 * REQUEST_BYTES_MAX]); // fails when the reader has enough
            });
            assert_eq!(connection.read().unwrap(), Line::Broken);
            connection.stream.shutdown(Shutdown::Both).unwrap();
            sending.join().unwrap();
        });
    }

    #[test]
    fn a_user_whose_connections_are_all_busy_gets_no_more_and_others_do() {
        let (slots, stream) = (ConnectionSlots::default(), Arc::new(UnixStream::pair().unwrap().0));
        let take = || {
            let slot = slots.take(0, &stream)?;
            slot.set_idle(false);
            Some(slot)
        };
        let taken: Vec<_> = (0..CONNECTIONS_MAX).map(|_| take().unwrap()).collect();
        assert!(take().is_none());
        assert!(slots.take(1, &stream).is_some());
        drop(taken);
        assert!(take().is_some());
    }

    #[test]
    fn the_connection_that_is_idle_longest_makes_room_and_what_it_was_sent_is_still_read() {
        let slots = ConnectionSlots::default();
        let pairs: Vec<_> = (0..CONNECTIONS_MAX).map(|_| UnixStream::pair().unwrap()).collect();
        let mut connections = Vec::new();
        let (ours, theirs): (Vec<_>, Vec<_>) =
            pairs.into_iter().map(|(ours, theirs)| (Arc::new(ours), theirs)).unzip();
        for stream in &ours {
            connections.push(Connection::new(stream, slots.take(0, stream).unwrap()).unwrap());
        }
        connections[0].slot.set_idle(false);
        (&theirs[1]).write_all(b"sent before\n").unwrap();
        let _next = slots.take(0, &ours[0]).unwrap();
        assert_eq!((&theirs[1]).write(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
        assert_eq!(connections[1].read().unwrap(), Line::Whole(b"sent before".to_vec()));
        assert_eq!(connections[1].read().unwrap(), Line::End);
        for peer in [&theirs[0], &theirs[2]] {
            assert_eq!((&*peer).write(b"x").unwrap(), 1);
        }
    }
}
