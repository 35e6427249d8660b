//! `branchfs diff`: what a branch changes, as a list, as JSON, as a patch, or counted.

use std::os::fd::AsFd;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde_json::{Value, json};

use super::{ask, show};

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
    let request = json!({ "verb": "diff", "branch": name, "stat": stat, "patch": patch });
    if *patch {
        let output = std::io::stdout();
        let reply = ask(mountpoint, request, Some(output.as_fd()))?.value;
        if let Some(left_out @ 1..) = reply["left_out"].as_u64() {
            eprintln!(
                "branchfs: {left_out} changes cannot be said in a patch; its lines that begin with # name them"
            );
        }
        return Ok(());
    }
    let reply = ask(mountpoint, request, None)?;
    if *json {
        return show(&reply.text);
    }
    let changes = reply.value["changes"].as_array().map_or(&[][..], Vec::as_slice);
    if *stat { show_counts(changes) } else { changes.iter().try_for_each(show_change) }
}

fn show_change(change: &Value) -> Result<()> {
    let text = |key: &str| change[key].as_str().unwrap_or_default();
    let mut line = format!("{:<9} {}", text("change"), name(change));
    if change["change"] == "metadata" {
        let aspects: Vec<&str> =
            change["aspects"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        line.push_str(&format!(" ({})", aspects.join(", ")));
    }
    show(&line)
}

/// The path, and where it came from; control characters are written as escapes.
fn name(change: &Value) -> String {
    let text = |key: &str| {
        let shown = |character: char| match character {
            control if control.is_control() => control.escape_default().collect::<String>(),
            other => other.to_string(),
        };
        change[key].as_str().map(|text| text.chars().map(shown).collect::<String>())
    };
    let path = text("path").unwrap_or_default();
    text("from").map_or(path.clone(), |from| format!("{from} => {path}"))
}

/// As `git diff --stat` shows it.
fn show_counts(changes: &[Value]) -> Result<()> {
    const BAR_MAX: u64 = 40;
    let names: Vec<String> = changes.iter().map(name).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    let lines = |change: &Value, what: &str| change["lines"][what].as_u64().unwrap_or(0);
    let total = |change: &Value| lines(change, "added") + lines(change, "removed");
    let largest = changes.iter().map(total).max().unwrap_or(0).max(BAR_MAX);
    for (change, name) in changes.iter().zip(&names) {
        let what = if change["lines"].is_object() {
            // No count is so small that it vanishes.
            let bar = |count: u64| (count * BAR_MAX).div_ceil(largest);
            let bar = |what: &str, sign: &str| {
                sign.repeat(usize::try_from(bar(lines(change, what))).unwrap_or(0))
            };
            format!("{:>5} {}{}", total(change), bar("added", "+"), bar("removed", "-"))
        } else if let Some(bytes) = change["bytes"].as_object() {
            format!("  Bin {} -> {} bytes", bytes["before"], bytes["after"])
        } else {
            let text = |key: &str| change[key].as_str().unwrap_or_default();
            format!("  {} {}", text("kind"), text("change"))
        };
        show(format!("{name:<width$} | {what}").trim_end())?;
    }
    let sum = |what: &str| changes.iter().map(|change| lines(change, what)).sum::<u64>();
    show(&format!(
        "{} paths changed, {} insertions(+), {} deletions(-)",
        changes.len(),
        sum("added"),
        sum("removed")
    ))
}
