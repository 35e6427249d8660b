//! One peer of the control socket: who it is, and the request lines it sends, within limits.
//!
//! A peer that has no business here is refused before anything it sent is read. One that has may keep a connection open
//! and silent, but a line that it has begun must end soon and be no longer than the protocol allows: a connection costs
//! a thread. Each user has a number of places. When a user has taken all of them, the connection of that user that has
//! been idle longest makes room for the next one, so idle connections never lock anybody out.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::descriptors::Socket;
use crate::descriptors::admit_connection;
use crate::error::Error;
use crate::peer::Peer;

/// Longest request line in bytes.
pub(super) const REQUEST_BYTES_MAX: usize = 1 << 20;

/// Connections of one user at a time, where the limit of descriptors allows them. At most three users are admitted: root,
/// the daemon's and the owner of the base.
pub(super) const CONNECTIONS_MAX: usize = 512;

/// How long a request line may take from its first byte to its last.
const LINE_WAIT_MAX: Duration = Duration::from_secs(10);

/// How long a reply waits for a peer that does not read.
const REPLY_WAIT_MAX: Duration = Duration::from_secs(30);

/// The open connections.
#[derive(Clone, Debug, Default)]
pub(super) struct Places(Arc<Mutex<Table>>);

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
    /// Since when no request is under way; `None`: one is.
    idle_since: Option<Instant>,
}

/// A place taken; given back at the end.
#[derive(Debug)]
pub(super) struct Place {
    places: Places,
    number: u64,
}

impl Places {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for a connection of a user. Where the user has none left, the connection that has been idle longest
    /// gives up its own: it is shut down for reading, so what its peer has sent is still answered, and what the peer
    /// sends from now on fails before any of it is carried out. `None`: all of them are busy.
    pub(super) fn take(&self, uid: u32, stream: &Arc<UnixStream>) -> Option<Place> {
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
        Some(Place { places: self.clone(), number })
    }
}

impl Place {
    /// A request begins (`false`), or the last one has been answered (`true`).
    fn set_idle(&self, is_idle: bool) {
        let mut table = self.places.table();
        if let Some(open) = table.open.iter_mut().find(|open| open.number == self.number) {
            open.idle_since = is_idle.then(Instant::now);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.table().open.retain(|open| open.number != self.number);
    }
}

/// Peers that were refused. One that still has its request to send would find a broken pipe instead of the answer if its
/// connection ended at once: the last few stay half open, without a thread.
#[derive(Debug, Default)]
pub(super) struct Refused(VecDeque<Arc<UnixStream>>);

impl Refused {
    /// How many stay.
    const KEPT_MAX: usize = 64;

    /// Answers without having been asked.
    pub(super) fn tell(&mut self, stream: Arc<UnixStream>, reply: &str) {
        // A new socket takes a line at once; a peer that has gone already needs none.
        let _ = (&*stream).write_all(reply.as_bytes());
        let _ = stream.shutdown(Shutdown::Write);
        self.0.push_back(stream);
        if self.0.len() > Self::KEPT_MAX {
            self.0.pop_front();
        }
    }
}

/// What a peer sent.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Line {
    /// A whole line, without its end.
    Whole(Vec<u8>),
    /// No line: too long, too slow, or cut off. What follows cannot be told apart from it.
    Broken,
    /// The peer has hung up.
    End,
}

/// The lines of one peer.
#[derive(Debug)]
pub(super) struct Connection<'s> {
    stream: &'s UnixStream,
    reader: BufReader<Socket<'s>>,
    /// Who connected.
    pub(super) peer: Peer,
    place: Place,
    line_wait_max: Duration,
}

impl<'s> Connection<'s> {
    pub(super) fn new(stream: &'s UnixStream, place: Place) -> io::Result<Self> {
        stream.set_write_timeout(Some(REPLY_WAIT_MAX))?;
        let reader = BufReader::new(Socket::new(stream));
        Ok(Self { stream, reader, peer: Peer::of(stream)?, place, line_wait_max: LINE_WAIT_MAX })
    }

    /// The descriptor that came with the request.
    pub(super) fn descriptor(&mut self, what: &str) -> Result<OwnedFd, Error> {
        self.reader.get_mut().descriptor().ok_or_else(|| {
            Error::Usage(format!("the request brings no descriptor {what} (SCM_RIGHTS)"))
        })
    }

    /// Waits for the next line.
    pub(super) fn read(&mut self) -> io::Result<Line> {
        let mut line = Vec::new();
        let mut deadline = None;
        self.place.set_idle(true);
        loop {
            let arrived = match self.reader.fill_buf() {
                Ok(arrived) => arrived,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Line::Broken),
                Err(error) => return Err(error),
            };
            self.place.set_idle(false);
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

    /// Sends a reply.
    pub(super) fn write(&mut self, reply: &str) -> io::Result<()> {
        self.stream.write_all(reply.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connected(line_wait_max: Duration, check: impl FnOnce(&mut Connection<'_>, UnixStream)) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let ours = Arc::new(ours);
        let place = Places::default().take(0, &ours).unwrap();
        let mut connection = Connection { line_wait_max, ..Connection::new(&ours, place).unwrap() };
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
        let (places, stream) = (Places::default(), Arc::new(UnixStream::pair().unwrap().0));
        let take = || {
            let place = places.take(0, &stream)?;
            place.set_idle(false);
            Some(place)
        };
        let taken: Vec<_> = (0..CONNECTIONS_MAX).map(|_| take().unwrap()).collect();
        assert!(take().is_none());
        assert!(places.take(1, &stream).is_some());
        drop(taken);
        assert!(take().is_some());
    }

    #[test]
    fn the_connection_that_is_idle_longest_makes_room_and_what_it_was_sent_is_still_read() {
        let places = Places::default();
        let pairs: Vec<_> = (0..CONNECTIONS_MAX).map(|_| UnixStream::pair().unwrap()).collect();
        let mut connections = Vec::new();
        let (ours, theirs): (Vec<_>, Vec<_>) =
            pairs.into_iter().map(|(ours, theirs)| (Arc::new(ours), theirs)).unzip();
        for stream in &ours {
            connections.push(Connection::new(stream, places.take(0, stream).unwrap()).unwrap());
        }
        connections[0].place.set_idle(false);
        (&theirs[1]).write_all(b"sent before\n").unwrap();
        let _next = places.take(0, &ours[0]).unwrap();
        assert_eq!((&theirs[1]).write(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
        assert_eq!(connections[1].read().unwrap(), Line::Whole(b"sent before".to_vec()));
        assert_eq!(connections[1].read().unwrap(), Line::End);
        for peer in [&theirs[0], &theirs[2]] {
            assert_eq!((&*peer).write(b"x").unwrap(), 1);
        }
    }
}
