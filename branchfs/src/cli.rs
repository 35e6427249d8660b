//! The commands of the program that are more than one request, one file each.

mod ask;
mod diff;
mod fsck;
mod log;
mod transfer;

pub(crate) use ask::ask;
pub(crate) use diff::{Diff, diff};
pub(crate) use fsck::{Fsck, fsck};
pub(crate) use log::log;
pub(crate) use transfer::{Export, Import, export, import};

use std::io::Write;

use anyhow::Result;

/// A line on standard output; a reader that has gone away ends the program quietly.
pub(crate) fn show(line: &str) -> Result<()> {
    match writeln!(std::io::stdout(), "{line}") {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}
