//! The client of the control protocol (docs/control.md): one request to the daemon of a mount.

use std::io::{BufRead, BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use branchfs::protocol::{ErrorReply, Reply, Request, Verb};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

/// Sends a request to the daemon of a mount and returns its reply.
pub(crate) fn request<V: Verb>(mountpoint: &Path, request: V) -> Result<V::Reply> {
    exchange(mountpoint, request, None)
}

/// Sends a request with an open file, which the daemon reads or writes.
pub(crate) fn request_with_file<V: Verb>(
    mountpoint: &Path,
    request: V,
    file: BorrowedFd<'_>,
) -> Result<V::Reply> {
    exchange(mountpoint, request, Some(file))
}

fn exchange<V: Verb>(
    mountpoint: &Path,
    request: V,
    file: Option<BorrowedFd<'_>>,
) -> Result<V::Reply> {
    let request: Request = request.into();
    let socket = branchfs::control_socket(mountpoint)?;
    let mut stream = UnixStream::connect(&socket).with_context(|| {
        format!(
            "the daemon does not answer at {} ('branchfs log BASE' prints its log)",
            socket.display()
        )
    })?;
    let line = request.to_line();
    let sent = send(&stream, line.as_bytes(), file)?;
    stream.write_all(&line.as_bytes()[sent..])?;
    let mut reply = Vec::new();
    BufReader::new(stream).read_until(b'\n', &mut reply)?;
    if reply.is_empty() {
        bail!(
            "the daemon exited before replying; the request may or may not have taken effect\nHint: 'branchfs log BASE' prints its log; mount the base again to recover"
        );
    }
    match serde_json::from_slice(&reply).context("the daemon's reply cannot be read")? {
        Reply::Ok(reply) => Ok(reply),
        Reply::Error(error) => Err(anyhow!(message(&error))),
    }
}

fn message(error: &ErrorReply) -> String {
    let mut message = error.message.clone();
    for path in &error.paths {
        message.push_str(&format!("\n  {path}"));
    }
    if let Some(hint) = &error.hint {
        message.push_str("\nHint: ");
        message.push_str(hint);
    }
    message
}

/// Sends the beginning of a line together with a file. Returns how many bytes were sent.
fn send(stream: &UnixStream, line: &[u8], file: Option<BorrowedFd<'_>>) -> Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
    if !files.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&files));
    }
    let flags = SendFlags::NOSIGNAL;
    Ok(rustix::net::sendmsg(stream, &[IoSlice::new(line)], &mut ancillary, flags)?)
}
