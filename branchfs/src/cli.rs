//! The client of the control protocol, and the commands that need more than one request, one file each.

pub(crate) mod client;
mod diff;
mod fsck;
mod in_use;
mod oci_layer;
mod print_log;

pub(crate) use diff::{Diff, diff};
pub(crate) use fsck::{Fsck, fsck};
pub(crate) use in_use::lock_exclusively;
pub(crate) use oci_layer::{Export, Import, export, import};
pub(crate) use print_log::log;

use std::io::Write;

use anyhow::Result;

/// Prints a line on standard output. If the reader has closed the pipe, the line is dropped without an error.
pub(crate) fn show(line: &str) -> Result<()> {
    match writeln!(std::io::stdout(), "{line}") {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// The word that the control protocol has for a value of an enum.
pub(crate) fn word(value: &impl serde::Serialize) -> String {
    let value = serde_json::to_value(value).unwrap_or_default();
    value.as_str().unwrap_or_default().to_owned()
}
