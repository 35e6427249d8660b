//! `branchfs export` and `branchfs import`: write a branch as an OCI layer, and create a branch from one.

use std::ffi::OsString;
use std::fs::File;
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use branchfs::protocol::{self, BranchRef};
use clap::Args;

use super::{client, show};

#[derive(Args)]
pub(crate) struct Export {
    /// Where to write it; `-` is standard output
    #[arg(long, short, value_name = "FILE", default_value = "-")]
    output: PathBuf,
    /// Write all that the branch shows, not only what it changed
    #[arg(long)]
    whole: bool,
    /// Leave out paths that match, and what is below them (may be repeated)
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,
    /// The branch
    name: String,
    /// The mountpoint
    mountpoint: PathBuf,
}

#[derive(Args)]
pub(crate) struct Import {
    /// The branch to fork
    #[arg(short, long, default_value = "main")]
    parent: String,
    /// Give everything to yourself (root: to the base's owner), whatever the archive says
    #[arg(long)]
    no_same_owner: bool,
    /// Load it also over what has changed since the archive was made
    #[arg(long)]
    force: bool,
    /// The new branch's name
    name: String,
    /// The mountpoint
    mountpoint: PathBuf,
}

pub(crate) fn export(arguments: &Export) -> Result<()> {
    let Export { output, whole, exclude, name, mountpoint } = arguments;
    let request = protocol::Export {
        branch: BranchRef::Name(name.clone()),
        whole: *whole,
        exclude: exclude.clone(),
    };
    if output == Path::new("-") {
        let output = std::io::stdout();
        if output.is_terminal() {
            bail!(
                "refusing to write an archive to a terminal\nHint: name a file with -o, or use a pipe"
            );
        }
        return client::request_with_file(mountpoint, request, output.as_fd()).map(|_| ());
    }
    // Write to an existing device or pipe. A rename would replace it.
    if output.metadata().is_ok_and(|found| !found.is_file()) {
        let file = File::options().write(true).open(output);
        let file = file.with_context(|| format!("{} cannot be opened", output.display()))?;
        return client::request_with_file(mountpoint, request, file.as_fd()).map(|_| ());
    }
    // The file has another name until it is complete.
    let mut draft = OsString::from(output);
    draft.push(format!(".{}.part", std::process::id()));
    let draft = PathBuf::from(draft);
    let file = File::create_new(&draft)
        .with_context(|| format!("{} cannot be created", draft.display()))?;
    let written = client::request_with_file(mountpoint, request, file.as_fd())
        .and_then(|_| file.sync_all().context("the archive cannot be written"))
        .and_then(|()| {
            let name = || format!("{} cannot be written", output.display());
            std::fs::rename(&draft, output).with_context(name)
        });
    if written.is_err() {
        let _ = std::fs::remove_file(&draft); // the first error is the one to report
    }
    written
}

pub(crate) fn import(arguments: &Import) -> Result<()> {
    let Import { parent, no_same_owner, force, name, mountpoint } = arguments;
    let input = std::io::stdin();
    if input.is_terminal() {
        bail!(
            "refusing to read an archive from a terminal\nHint: branchfs import NAME MNT < layer.tar"
        );
    }
    let request = protocol::Import {
        name: name.clone(),
        parent: Some(BranchRef::Name(parent.clone())),
        no_same_owner: *no_same_owner,
        force: *force,
        lease: false,
    };
    let branch = client::request_with_file(mountpoint, request, input.as_fd())?;
    if branch.has_base_record == Some(false) && !force {
        eprintln!(
            "branchfs: note: the archive does not record the state it was made from; later changes are not detected"
        );
    }
    show(&branch.path.to_string())
}
