//! `branchfs log`: prints the daemon's log, also that of a daemon that has died.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::json;

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

/// A mount knows its store as long as its daemon lives.
fn store_or_base(path: &Path) -> Result<PathBuf> {
    std::fs::metadata(path).with_context(|| path.display().to_string()).or_else(|error| {
        // A mountpoint whose daemon is gone says so itself.
        branchfs::control_socket(path).map(drop).and(Err(error))
    })?;
    if branchfs::control_socket(path).is_err() {
        return Ok(path.to_path_buf());
    }
    let info = super::ask(path, json!({ "verb": "info" }), None)?.value;
    Ok(PathBuf::from(info["store"].as_str().unwrap_or_default()))
}
