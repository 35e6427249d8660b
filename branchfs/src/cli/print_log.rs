//! `branchfs log`: prints the daemon's log, also after the daemon has died.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use branchfs::protocol;

pub(crate) fn log(path: &Path) -> Result<()> {
    let files = branchfs::open_log(&store_or_base(path)?)?;
    if files.is_empty() {
        bail!("the store of {} has no log", path.display());
    }
    for mut file in files {
        match io::copy(&mut file, &mut io::stdout()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            other => other.map(drop)?,
        }
    }
    Ok(())
}

/// Returns the store if `path` is a mountpoint, which only the daemon of the mount knows; otherwise `path`.
fn store_or_base(path: &Path) -> Result<PathBuf> {
    std::fs::metadata(path).with_context(|| path.display().to_string()).or_else(|error| {
        // If the daemon of the mountpoint has died, its error says so.
        branchfs::control_socket(path).map(drop).and(Err(error))
    })?;
    if branchfs::control_socket(path).is_err() {
        return Ok(path.to_path_buf());
    }
    Ok(super::client::request(path, protocol::Info {})?.store.0)
}
