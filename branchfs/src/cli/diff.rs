//! `branchfs diff`: shows the changes of a branch as a list, as JSON, as a patch, or with line counts.

use std::os::fd::AsFd;
use std::path::PathBuf;

use anyhow::Result;
use branchfs::protocol::{self, BranchRef, ChangeKind, Difference, WirePath};
use clap::Args;

use super::{client, show, word};

#[derive(Args)]
pub(crate) struct Diff {
    /// As JSON: one object, `changes` as docs/control.md has it
    #[arg(long)]
    json: bool,
    /// As a patch that `git apply` takes
    #[arg(long, short, conflicts_with_all = ["json", "stat"])]
    patch: bool,
    /// Count the lines that changed
    #[arg(long)]
    stat: bool,
    /// The branch
    name: String,
    /// The mountpoint
    mountpoint: PathBuf,
}

pub(crate) fn diff(arguments: &Diff) -> Result<()> {
    let Diff { json, patch, stat, name, mountpoint } = arguments;
    let branch = BranchRef::Name(name.clone());
    let request = protocol::Diff { branch, stat: *stat, patch: *patch };
    if *patch {
        let output = std::io::stdout();
        let reply = client::request_with_file(mountpoint, request, output.as_fd())?;
        if let Some(left_out @ 1..) = reply.left_out {
            eprintln!(
                "branchfs: {left_out} changes cannot be represented in a patch; they are listed in its '#' lines"
            );
        }
        return Ok(());
    }
    let reply = client::request(mountpoint, request)?;
    if *json {
        return show(&serde_json::to_string(&reply)?);
    }
    let changes = reply.changes.unwrap_or_default();
    if *stat { show_counts(&changes) } else { changes.iter().try_for_each(show_change) }
}

fn show_change(change: &Difference) -> Result<()> {
    let mut line = format!("{:<9} {}", word(&change.change), name(change));
    if change.change == ChangeKind::Metadata {
        let fields: Vec<String> = change.aspects.iter().map(word).collect();
        line.push_str(&format!(" ({})", fields.join(", ")));
    }
    show(&line)
}

/// The path, and the previous path of a renamed object. Control characters are escaped.
fn name(change: &Difference) -> String {
    let escape = |path: &WirePath| {
        let escape = |character: char| match character {
            control if control.is_control() => control.escape_default().collect::<String>(),
            other => other.to_string(),
        };
        path.to_string().chars().map(escape).collect::<String>()
    };
    let path = escape(&change.path);
    change.from.as_ref().map_or(path.clone(), |from| format!("{} => {path}", escape(from)))
}

/// Shows the counts in the format of `git diff --stat`.
fn show_counts(changes: &[Difference]) -> Result<()> {
    const BAR_MAX: usize = 40;
    let names: Vec<String> = changes.iter().map(name).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    let counts =
        |change: &Difference| change.lines.map_or((0, 0), |lines| (lines.added, lines.removed));
    let totals = changes.iter().map(|change| counts(change).0 + counts(change).1);
    let largest = totals.max().unwrap_or(0).max(BAR_MAX);
    for (change, name) in changes.iter().zip(&names) {
        let text = if let Some(lines) = change.lines {
            // Every count of at least one has at least one sign.
            let bar = |sign: &str, count: usize| sign.repeat((count * BAR_MAX).div_ceil(largest));
            let total = lines.added + lines.removed;
            format!("{total:>5} {}{}", bar("+", lines.added), bar("-", lines.removed))
        } else if let Some(bytes) = change.bytes {
            format!("  Bin {} -> {} bytes", bytes.before, bytes.after)
        } else {
            format!("  {} {}", word(&change.kind), word(&change.change))
        };
        show(format!("{name:<width$} | {text}").trim_end())?;
    }
    show(&format!(
        "{} paths changed, {} insertions(+), {} deletions(-)",
        changes.len(),
        changes.iter().map(|change| counts(change).0).sum::<usize>(),
        changes.iter().map(|change| counts(change).1).sum::<usize>()
    ))
}
