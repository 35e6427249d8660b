//! The `branchfs` program: mounts, unmounts, and asks a mount's daemon.

mod cli;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use branchfs::{Choice, LogLevel, Options, Policy, RecoverOptions};
use clap::{Parser, Subcommand};
use serde_json::{Value, json};

use cli::show;

/// Copy-on-write branches over an ordinary directory: fork, explore, commit.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Mount a workspace; returns when it is ready. Branches appear at MOUNTPOINT/@name
    Mount {
        /// The directory to branch from
        #[arg(long, value_name = "DIR", default_value = ".")]
        base: PathBuf,
        /// Where branches are kept [default: .branching in the base]
        #[arg(long, value_name = "DIR")]
        store: Option<PathBuf>,
        /// Show a control file in every branch, as the published BranchFS does: whoever may write
        /// there may commit
        #[arg(long)]
        control_files: bool,
        /// The published BranchFS's word for --store and --control-files
        #[arg(long, value_name = "DIR", conflicts_with = "store")]
        storage: Option<PathBuf>,
        /// What presents a branch as a directory
        #[arg(long, value_enum, default_value = "auto", env = "BRANCHFS_DRIVER")]
        driver: Choice,
        /// What happens to the siblings of a committed branch
        #[arg(long, value_enum, default_value = "first-winner", env = "BRANCHFS_POLICY")]
        policy: Policy,
        /// How many commits can be undone at most; 0 keeps nothing
        #[arg(long, value_name = "N", default_value_t = branchfs::HISTORY_COMMITS_DEFAULT)]
        history: usize,
        /// Answer every read and write here instead of letting the kernel do it (Linux 6.9, root)
        #[arg(long, env = "BRANCHFS_NO_PASSTHROUGH",
              value_parser = clap::builder::FalseyValueParser::new())]
        no_passthrough: bool,
        /// The published BranchFS's word for what is the default here
        #[arg(long, hide = true, conflicts_with = "no_passthrough")]
        passthrough: bool,
        /// What the daemon writes to its log, `branchfs.log` in the store
        #[arg(
            long,
            value_enum,
            value_name = "LEVEL",
            default_value = "info",
            env = "BRANCHFS_LOG"
        )]
        log_level: LogLevel,
        /// Stay in the foreground
        #[arg(long)]
        foreground: bool,
        /// Where to mount: a directory outside of the base
        mountpoint: PathBuf,
    },
    /// Unmount a workspace; returns when nothing of it is left but kept branches
    Unmount {
        /// Let it vanish at once although it is in use
        #[arg(long)]
        lazy: bool,
        #[command(flatten)]
        published: Published,
        /// The mountpoint
        mountpoint: PathBuf,
    },
    /// Create a branch
    Create {
        /// The branch to fork
        #[arg(short, long, default_value = "main")]
        parent: String,
        /// Bytes that the branch may add; above that writing fails (EDQUOT)
        #[arg(long, value_name = "BYTES")]
        disk_limit: Option<std::num::NonZeroU64>,
        #[command(flatten)]
        published: Published,
        /// Its name
        name: String,
        /// The mountpoint
        mountpoint: PathBuf,
    },
    /// Commit a branch into its parent
    #[command(allow_missing_positional = true)]
    Commit {
        /// Overwrite what others changed in the base since the fork
        #[arg(long)]
        force: bool,
        /// Do not commit the paths that others changed since the fork; the branch keeps its version
        /// of them
        #[arg(long, conflicts_with = "force")]
        skip: bool,
        /// Commit these paths alone; the branch stays open with the rest. As in .gitignore: a pattern
        /// without a slash means a name anywhere, a directory all that is in it
        #[arg(long, value_name = "GLOB")]
        only: Vec<String>,
        /// Do not commit these paths; the branch stays open with them
        #[arg(long, value_name = "GLOB")]
        exclude: Vec<String>,
        /// Drop the paths that --only, --exclude or --skip leave, and close the branch
        #[arg(long)]
        drop_rest: bool,
        /// Show what would change, and change nothing
        #[arg(long)]
        dry_run: bool,
        /// Fork the branch anew first if a sibling was committed before it; paths that both changed
        /// are a conflict
        #[arg(long)]
        rebase: bool,
        /// What happens to the siblings, if not what the mount says
        #[arg(long, value_enum)]
        policy: Option<Policy>,
        #[command(flatten)]
        published: Published,
        /// The branch; may be left out where the mount has control files: the current one
        name: Option<String>,
        /// The mountpoint
        mountpoint: PathBuf,
    },
    /// Fork a branch anew from its parent as it is now, and keep its changes
    Rebase {
        /// Keep the branch's version of the paths that others changed since the fork
        #[arg(long)]
        force: bool,
        /// List those paths, and change nothing
        #[arg(long)]
        dry_run: bool,
        /// The branch
        name: String,
        /// The mountpoint
        mountpoint: PathBuf,
    },
    /// Drop a branch and its children
    #[command(allow_missing_positional = true)]
    Abort {
        #[command(flatten)]
        published: Published,
        /// The branch; may be left out where the mount has control files: the current one
        name: Option<String>,
        /// The mountpoint
        mountpoint: PathBuf,
    },
    /// List the open branches
    List {
        /// The mountpoint
        mountpoint: PathBuf,
    },
    /// Show what a branch changes: added, modified, deleted, renamed, type, metadata
    Diff(cli::Diff),
    /// Write what a branch changes as an OCI layer (tar)
    Export(cli::Export),
    /// Create a branch from an OCI layer (tar) on standard input
    Import(cli::Import),
    /// Check a store that is not mounted: 0 clean, 1 repaired, 4 damaged, 8 not checked
    Fsck(cli::Fsck),
    /// Settle a transaction that a crash has interrupted, without mounting
    Recover {
        /// Where branches are kept [default: what the base names]
        #[arg(long, value_name = "DIR")]
        store: Option<PathBuf>,
        /// How many commits can be undone at most; 0 keeps nothing
        #[arg(long, value_name = "N", default_value_t = branchfs::HISTORY_COMMITS_DEFAULT)]
        history: usize,
        /// What is written to the log in the store
        #[arg(
            long,
            value_enum,
            value_name = "LEVEL",
            default_value = "info",
            env = "BRANCHFS_LOG"
        )]
        log_level: LogLevel,
        /// Wait for the end of the process whose pidfd is the standard input: how a daemon starts it
        #[arg(long, hide = true)]
        guard: bool,
        /// The base
        #[arg(default_value = ".")]
        base: PathBuf,
    },
    /// Print the log of the daemon, which it keeps in the store
    Log {
        /// A base, a store or a mountpoint
        #[arg(default_value = ".")]
        path: PathBuf,
    },
    /// Take the last commit to main back
    Undo {
        #[command(flatten)]
        revert: Revert,
    },
    /// Commit again what was undone last
    Redo {
        #[command(flatten)]
        revert: Revert,
    },
    /// List the commits that can be undone, oldest first
    History {
        /// As JSON
        #[arg(long)]
        json: bool,
        /// The mountpoint
        mountpoint: PathBuf,
    },
    /// Forget old commits: they cannot be undone any more, and their space is free
    Prune {
        /// How many of the newest to keep
        #[arg(long, value_name = "N", default_value_t = 0)]
        keep: usize,
        /// The mountpoint
        mountpoint: PathBuf,
    },
}

/// What `undo` and `redo` take.
#[derive(clap::Args)]
struct Revert {
    /// Overwrite what others changed since; open branches become stale
    #[arg(long)]
    force: bool,
    /// Show what would change, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// The mountpoint
    mountpoint: PathBuf,
}

/// What the published BranchFS's commands take beside ours: a mount knows its store by itself.
#[derive(clap::Args)]
struct Published {
    #[arg(long, value_name = "DIR", hide = true)]
    storage: Option<PathBuf>,
}

/// How the program ends.
enum Exit {
    Success,
    Failure,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        match exit {
            Exit::Success => Self::SUCCESS,
            Exit::Failure => Self::FAILURE,
        }
    }
}

fn main() -> ExitCode {
    let command = Arguments::parse().command;
    if let Command::Fsck(arguments) = &command {
        return cli::fsck(arguments);
    }
    match run(command) {
        Ok(()) => Exit::Success.into(),
        Err(error) => {
            eprintln!("branchfs: {error:#}");
            if let Some(hint) =
                error.downcast_ref::<branchfs::Error>().and_then(branchfs::Error::hint)
            {
                eprintln!("Hint: {hint}");
            }
            Exit::Failure.into()
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Mount {
            base,
            store,
            control_files,
            storage,
            driver,
            policy,
            history,
            no_passthrough,
            passthrough: _,
            log_level,
            foreground,
            mountpoint,
        } => {
            let control_files = control_files || storage.is_some();
            let store = store.or(storage);
            let (history_commits_max, passthrough) = (history, !no_passthrough);
            let options = Options {
                base,
                store,
                mountpoint,
                policy,
                history_commits_max,
                control_files,
                passthrough,
                driver,
                log_level,
            };
            mount(&options, foreground)
        }
        Command::Unmount { lazy, published: _, mountpoint } => {
            if let Some(left) = branchfs::stop(&mountpoint, lazy)? {
                eprintln!("branchfs: {left}");
            }
            Ok(())
        }
        Command::Create { parent, disk_limit, published: _, name, mountpoint } => {
            let request = json!({
                "verb": "create", "name": name, "parent": parent, "disk_limit": disk_limit,
            });
            let branch = ask(&mountpoint, request)?;
            make_current(&mountpoint, &name)?;
            show(branch["path"].as_str().unwrap_or_default())
        }
        Command::Commit {
            force,
            skip,
            only,
            exclude,
            drop_rest,
            dry_run,
            rebase,
            policy,
            published: _,
            name,
            mountpoint,
        } => {
            let name = named_or_current(name, &mountpoint)?;
            let request = json!({
                "verb": "commit", "branch": name, "force": force, "dry_run": dry_run,
                "policy": policy.map(Policy::name), "skip": skip, "only": only, "exclude": exclude,
                "rebase": rebase, "drop_rest": drop_rest,
            });
            let committed = ask(&mountpoint, request)?;
            show_changes(&committed)?;
            match committed["remaining"].as_u64() {
                Some(count @ 1..) if !dry_run => eprintln!(
                    "branchfs: branch {name} stays open: changed paths that were not committed: {count}"
                ),
                _ => {}
            }
            Ok(())
        }
        Command::Rebase { force, dry_run, name, mountpoint } => {
            let request =
                json!({ "verb": "rebase", "branch": name, "force": force, "dry_run": dry_run });
            for path in ask(&mountpoint, request)?["conflicts"].as_array().into_iter().flatten() {
                show(path.as_str().unwrap_or_default())?;
            }
            Ok(())
        }
        Command::Abort { published: _, name, mountpoint } => {
            let name = named_or_current(name, &mountpoint)?;
            ask(&mountpoint, json!({ "verb": "abort", "branch": name })).map(|_| ())
        }
        Command::List { mountpoint } => {
            let reply = ask(&mountpoint, json!({ "verb": "list" }))?;
            for branch in reply["branches"].as_array().into_iter().flatten() {
                let text = |key: &str| branch[key].as_str().unwrap_or_default().to_owned();
                show(&format!("{}\t{}\t{}", text("name"), text("state"), text("path")))?;
            }
            Ok(())
        }
        Command::Undo { revert } => revert_last("undo", &revert),
        Command::Redo { revert } => revert_last("redo", &revert),
        Command::History { json, mountpoint } => {
            let reply = ask(&mountpoint, json!({ "verb": "history" }))?;
            if json {
                return show(&reply.to_string());
            }
            for entry in reply["entries"].as_array().into_iter().flatten() {
                let state = if entry["undone"].is_null() { "committed" } else { "undone" };
                let branch = entry["branch"].as_str().unwrap_or_default();
                show(&format!("{}\t{state}\t{branch}\t{} changes", entry["id"], entry["changes"]))?;
            }
            Ok(())
        }
        Command::Prune { keep, mountpoint } => {
            let reply = ask(&mountpoint, json!({ "verb": "prune", "keep": keep }))?;
            show(&format!("{} commits forgotten, {} bytes", reply["removed"], reply["bytes"]))
        }
        Command::Diff(arguments) => cli::diff(&arguments),
        Command::Export(arguments) => cli::export(&arguments),
        Command::Import(arguments) => cli::import(&arguments),
        Command::Recover { store, history, log_level, guard, base } => {
            let options = RecoverOptions { base, store, history_commits_max: history, log_level };
            if guard {
                return Ok(branchfs::recover_after_death(&options)?);
            }
            let done = branchfs::recover(&options)?;
            if done.is_empty() {
                return show("nothing to recover");
            }
            done.iter().try_for_each(|line| show(line))
        }
        Command::Log { path } => cli::log(&path),
        Command::Fsck(_) => Ok(()), // its outcome is an exit code of its own, see `main`
    }
}

fn revert_last(verb: &str, revert: &Revert) -> Result<()> {
    let request = json!({ "verb": verb, "force": revert.force, "dry_run": revert.dry_run });
    show_changes(&ask(&revert.mountpoint, request)?)
}

fn mount(options: &Options, foreground: bool) -> Result<()> {
    if std::env::var_os(branchfs::BACKGROUND).is_some() {
        return branchfs::run(options, branchfs::announce);
    }
    if foreground {
        return branchfs::run(options, || ());
    }
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    branchfs::start(&arguments)
}

/// The control file of a mount's root: its content is the name of the current branch.
const CONTROL_FILE: &str = ".branchfs_ctl";

/// Where a mount has control files, `create` makes the new branch the current one, as the published program does.
fn make_current(mountpoint: &Path, name: &str) -> Result<()> {
    if !has_control_files(mountpoint)? {
        return Ok(());
    }
    let file = mountpoint.join(CONTROL_FILE);
    std::fs::write(&file, format!("switch:{name}")).with_context(|| file.display().to_string())
}

fn has_control_files(mountpoint: &Path) -> Result<bool> {
    Ok(ask(mountpoint, json!({ "verb": "info" }))?["control_files"] == true)
}

/// The branch that a command names, or else the current one.
fn named_or_current(name: Option<String>, mountpoint: &Path) -> Result<String> {
    if let Some(name) = name {
        return Ok(name);
    }
    if !has_control_files(mountpoint)? {
        bail!(
            "no branch is named, and without control files none is the current one\nHint: give its name before the mountpoint"
        );
    }
    let file = mountpoint.join(CONTROL_FILE);
    let current = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    if current == "main" {
        bail!("no branch is the current one\nHint: give its name before the mountpoint");
    }
    Ok(current)
}

/// One request to the daemon of a mount.
fn ask(mountpoint: &Path, request: Value) -> Result<Value> {
    Ok(cli::ask(mountpoint, request, None)?.value)
}

fn show_changes(reply: &Value) -> Result<()> {
    for change in reply["changes"].as_array().into_iter().flatten() {
        let text = |key: &str| change[key].as_str().unwrap_or_default();
        show(&format!("{:<9} {}", text("change"), text("path")))?;
    }
    Ok(())
}
