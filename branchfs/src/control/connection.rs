//! One peer of the control socket: who it is, and the request lines it sends, within limits.
//!
//! A peer that has no business here is refused before anything it sent is read. One that has may keep a connection open
//! and silent for as long as it likes, but a line that it has begun must end soon and be no longer than the protocol
//! allows: a connection costs a thread, and there are only so many.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::descriptors::Socket;
use crate::error::Error;
use crate::peer::Peer;

/// Longest request line in bytes.
pub(super) const REQUEST_BYTES_MAX: usize = 1 << 20;

/// Connections at a time.
pub(super) const CONNECTIONS_MAX: usize = 512;

/// How long a request line may take from its first byte to its last.
const LINE_WAIT_MAX: Duration = Duration::from_secs(10);

/// How long a reply waits for a peer that does not read.
const REPLY_WAIT_MAX: Duration = Duration::from_secs(30);

/// The numbered places for connections.
#[derive(Clone, Debug, Default)]
pub(super) struct Places(Arc<AtomicUsize>);

/// A place taken; given back at the end.
#[derive(Debug)]
pub(super) struct Place(Arc<AtomicUsize>);

impl Places {
    /// Takes a place, if one is free.
    pub(super) fn take(&self) -> Option<Place> {
        let place = Place(Arc::clone(&self.0));
        (place.0.fetch_add(1, Ordering::AcqRel) < CONNECTIONS_MAX).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Peers that were refused. One that still has its request to send would find a broken pipe instead of the answer if its
/// connection ended at once: the last few stay half open, without a thread.
#[derive(Debug, Default)]
pub(super) struct Refused(VecDeque<UnixStream>);

impl Refused {
    /// How many stay.
    const KEPT_MAX: usize = 64;

    /// Answers without having been asked.
    pub(super) fn tell(&mut self, stream: UnixStream, reply: &str) {
        // A new socket takes a line at once; a peer that has gone already needs none.
        let _ = (&stream).write_all(reply.as_bytes());
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
    line_wait_max: Duration,
}

impl<'s> Connection<'s> {
    pub(super) fn new(stream: &'s UnixStream) -> io::Result<Self> {
        stream.set_write_timeout(Some(REPLY_WAIT_MAX))?;
        let reader = BufReader::new(Socket::new(stream));
        Ok(Self { stream, reader, peer: Peer::of(stream)?, line_wait_max: LINE_WAIT_MAX })
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
        loop {
            let arrived = match self.reader.fill_buf() {
                Ok(arrived) => arrived,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Line::Broken),
                Err(error) => return Err(error),
            };
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
        let mut connection = Connection { line_wait_max, ..Connection::new(&ours).unwrap() };
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
    fn places_are_counted_and_given_back() {
        let places = Places::default();
        let taken: Vec<_> = (0..CONNECTIONS_MAX).map(|_| places.take().unwrap()).collect();
        assert!(places.take().is_none());
        drop(taken);
        assert!(places.take().is_some());
    }
}
