//! `branchfs export` and `branchfs import`: a branch as an OCI layer.

use std::ffi::OsString;
use std::fs::File;
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::json;

use super::{ask, show};

#[derive(Args)]
pub(crate) struct Export {
    /// Where to write it; `-` is standard output
    #[arg(long, short, value_name = "FILE", default_value = "-")]
    output: PathBuf,
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
    let Export { output, name, mountpoint } = arguments;
    let request = json!({ "verb": "export", "branch": name });
    if output == Path::new("-") {
        let output = std::io::stdout();
        if output.is_terminal() {
            bail!("an archive is not written to a terminal\nHint: give a file with -o, or a pipe");
        }
        return ask(mountpoint, request, Some(output.as_fd())).map(|_| ());
    }
    // A device or a pipe is written to; a rename would replace it.
    if output.metadata().is_ok_and(|found| !found.is_file()) {
        let file = File::options().write(true).open(output);
        let file = file.with_context(|| format!("{} cannot be opened", output.display()))?;
        return ask(mountpoint, request, Some(file.as_fd())).map(|_| ());
    }
    // Under another name until it is whole.
    let mut draft = OsString::from(output);
    draft.push(format!(".{}.part", std::process::id()));
    let draft = PathBuf::from(draft);
    let file =
        File::create_new(&draft).with_context(|| format!("{} cannot be made", draft.display()))?;
    let written = ask(mountpoint, request, Some(file.as_fd()))
        .and_then(|_| file.sync_all().context("the archive cannot be written"))
        .and_then(|()| {
            let name = || format!("{} cannot be written", output.display());
            std::fs::rename(&draft, output).with_context(name)
        });
    if written.is_err() {
        let _ = std::fs::remove_file(&draft); // the error says what is wrong
    }
    written
}

pub(crate) fn import(arguments: &Import) -> Result<()> {
    let Import { parent, no_same_owner, force, name, mountpoint } = arguments;
    let input = std::io::stdin();
    if input.is_terminal() {
        bail!("an archive is not read from a terminal\nHint: branchfs import NAME MNT < layer.tar");
    }
    let request = json!({
        "verb": "import", "name": name, "parent": parent, "no_same_owner": no_same_owner, "force": force,
    });
    let branch = ask(mountpoint, request, Some(input.as_fd()))?.value;
    if branch["has_base_record"] == false && !force {
        eprintln!(
            "branchfs: note: the archive does not say what it was made against; changes made since are not detected"
        );
    }
    show(branch["path"].as_str().unwrap_or_default())
}
