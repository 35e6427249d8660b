//! One request to the daemon of a mount (docs/control.md).

use std::io::{BufRead, BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::Value;

/// What the daemon answered.
pub(crate) struct Reply {
    /// The answer. Bytes of names outside UTF-8 are written out as `\udcXX`.
    pub(crate) value: Value,
    /// The same as it came: JSON, with lone surrogates for such bytes.
    pub(crate) text: String,
}

/// Asks, handing over an open file where the request needs one.
pub(crate) fn ask(
    mountpoint: &Path,
    mut request: Value,
    descriptor: Option<BorrowedFd<'_>>,
) -> Result<Reply> {
    request["v"] = 1.into();
    let socket = branchfs::control_socket(mountpoint)?;
    let mut stream = UnixStream::connect(&socket).with_context(|| {
        format!(
            "the daemon does not answer at {} ('branchfs log BASE' prints its log)",
            socket.display()
        )
    })?;
    let line = format!("{request}\n");
    let sent = send(&stream, line.as_bytes(), descriptor)?;
    stream.write_all(&line.as_bytes()[sent..])?;
    let mut text = String::new();
    BufReader::new(stream).read_line(&mut text)?;
    if text.is_empty() {
        bail!(
            "the daemon exited before replying; the request may or may not have taken effect\nHint: 'branchfs log BASE' prints its log; mount the base again to recover"
        );
    }
    let reply: Value = serde_json::from_str(&text.replace("\\udc", "\\\\udc"))
        .context("the daemon's reply cannot be read")?;
    let Some(error) = reply.get("error") else {
        let inner =
            text.trim_end().strip_prefix("{\"ok\":").and_then(|rest| rest.strip_suffix('}'));
        let text = inner.unwrap_or_default().to_owned();
        return Ok(Reply { value: reply["ok"].clone(), text });
    };
    let mut message = error["message"].as_str().unwrap_or("unknown error").to_owned();
    for path in error["paths"].as_array().into_iter().flatten() {
        message.push_str("\n  ");
        message.push_str(path.as_str().unwrap_or_default());
    }
    if let Some(hint) = error["hint"].as_str() {
        message.push_str("\nHint: ");
        message.push_str(hint);
    }
    bail!("{message}")
}

/// Sends the beginning of a request with its descriptor. Returns how much was sent.
fn send(stream: &UnixStream, line: &[u8], descriptor: Option<BorrowedFd<'_>>) -> Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<BorrowedFd<'_>> = descriptor.into_iter().collect();
    if !descriptors.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    }
    let flags = SendFlags::NOSIGNAL;
    Ok(rustix::net::sendmsg(stream, &[IoSlice::new(line)], &mut ancillary, flags)?)
}
