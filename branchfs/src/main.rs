//! The `branchfs` program: mounts, unmounts, and asks a mount's daemon.

mod cli;

use std::ffi::OsString;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use branchfs::protocol::{self, BranchRef, BranchState, Change};
use branchfs::{DriverKind, LogLevel, Options, Policy, RecoverOptions};
use clap::{Parser, Subcommand};

use cli::{client, lock_exclusively, show};

/// Copy-on-write branches over an ordinary directory: fork, explore, commit.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

/// The argument of `--policy`.
#[derive(Clone, Copy, clap::ValueEnum)]
enum PolicyArgument {
    /// The first child to commit wins, its siblings become stale
    FirstWinner,
    /// Siblings stay live; each can be committed if its changes do not conflict
    Snapshot,
    /// As snapshot, but a commit also conflicts if the branch read what others have changed since
    Serializable,
}

impl From<PolicyArgument> for Policy {
    fn from(argument: PolicyArgument) -> Self {
        match argument {
            PolicyArgument::FirstWinner => Self::FirstWinner,
            PolicyArgument::Snapshot => Self::Snapshot,
            PolicyArgument::Serializable => Self::Serializable,
        }
    }
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
        /// Accepted for the published BranchFS: --store and --control-files
        #[arg(long, value_name = "DIR", conflicts_with = "store")]
        storage: Option<PathBuf>,
        /// The driver that mounts a branch
        #[arg(long, value_enum, default_value = "auto", env = "BRANCHFS_DRIVER")]
        driver: DriverKind,
        /// What happens to the siblings of a committed branch
        #[arg(long, value_enum, default_value = "first-winner", env = "BRANCHFS_POLICY")]
        policy: PolicyArgument,
        /// How many commits can be undone at most; 0 keeps nothing
        #[arg(long, value_name = "N", default_value_t = branchfs::HISTORY_COMMITS_DEFAULT)]
        history: usize,
        /// Do not use FUSE passthrough: every read and write goes to the daemon. By default the kernel
        /// serves them where it can (Linux 6.9, root)
        #[arg(long, env = "BRANCHFS_NO_PASSTHROUGH",
              value_parser = clap::builder::FalseyValueParser::new())]
        no_passthrough: bool,
        /// Accepted for the published BranchFS; it is the default here
        #[arg(long, hide = true, conflicts_with = "no_passthrough")]
        passthrough: bool,
        /// The level of the daemon's log, `branchfs.log` in the store
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
        /// Where to mount: a directory outside the base
        mountpoint: PathBuf,
    },
    /// Unmount a workspace and end its daemon; kept branches stay in the store
    Unmount {
        /// Detach the mount at once, even if it is in use
        #[arg(long)]
        lazy: bool,
        #[command(flatten)]
        legacy: LegacyOptions,
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
        disk_limit: Option<NonZeroU64>,
        #[command(flatten)]
        legacy: LegacyOptions,
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
        /// Commit only these paths; the branch stays open with the rest. Patterns are as in .gitignore:
        /// one without a slash matches the name anywhere, a directory matches all that is in it
        #[arg(long, value_name = "GLOB")]
        only: Vec<String>,
        /// Do not commit these paths; the branch stays open with them
        #[arg(long, value_name = "GLOB")]
        exclude: Vec<String>,
        /// Drop the paths that --only, --exclude or --skip leave, and close the branch
        #[arg(long)]
        drop_rest: bool,
        /// Show what would change, but change nothing
        #[arg(long)]
        dry_run: bool,
        /// Rebase the branch first if it is stale; paths that both sides changed are a conflict
        #[arg(long)]
        rebase: bool,
        /// What happens to the siblings [default: the policy of the mount]
        #[arg(long, value_enum)]
        policy: Option<PolicyArgument>,
        #[command(flatten)]
        legacy: LegacyOptions,
        /// The branch; may be left out where the mount has control files: the current one
        name: Option<String>,
        /// The mountpoint
        mountpoint: PathBuf,
    },
    /// Rebase a branch: its changes stay, on top of the present state of its parent
    Rebase {
        /// Keep the branch's version of the paths that others changed since the fork
        #[arg(long)]
        force: bool,
        /// List those paths, but change nothing
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
        legacy: LegacyOptions,
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
    /// Complete or roll back a transaction that a crash interrupted, without a mount
    Recover {
        /// The store [default: the one that the base names]
        #[arg(long, value_name = "DIR")]
        store: Option<PathBuf>,
        /// How many commits can be undone at most; 0 keeps nothing
        #[arg(long, value_name = "N", default_value_t = branchfs::HISTORY_COMMITS_DEFAULT)]
        history: usize,
        /// The level of the log in the store
        #[arg(
            long,
            value_enum,
            value_name = "LEVEL",
            default_value = "info",
            env = "BRANCHFS_LOG"
        )]
        log_level: LogLevel,
        /// Wait until the process whose pidfd is standard input has ended; used by the daemon
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
    /// Undo the last commit to main
    Undo {
        #[command(flatten)]
        revert: UndoArgs,
    },
    /// Redo the commit that was undone last
    Redo {
        #[command(flatten)]
        revert: UndoArgs,
    },
    /// List the commits that can be undone, oldest first
    History {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// The mountpoint
        mountpoint: PathBuf,
    },
    /// Delete the history of old commits: frees its space, and they can no longer be undone
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
struct UndoArgs {
    /// Overwrite what others changed since; open branches become stale
    #[arg(long)]
    force: bool,
    /// Show what would change, but change nothing
    #[arg(long)]
    dry_run: bool,
    /// The mountpoint
    mountpoint: PathBuf,
}

/// What the published BranchFS's commands take beside ours: a mount knows its store by itself.
#[derive(clap::Args)]
struct LegacyOptions {
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
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    if let [command, arguments @ ..] = &arguments[..] {
        // `sandbox` starts commands: the initialisation for the other commands would delay each of these.
        if command == "sandbox" {
            return branchfs_sandbox::run(arguments);
        }
    }
    let command = Arguments::parse().command;
    if let Command::Fsck(arguments) = &command {
        return cli::fsck(arguments);
    }
    match run(command) {
        Ok(()) => Exit::Success.into(),
        Err(error) => {
            eprintln!("branchfs: {}", branchfs::with_causes(error.as_ref()));
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
                policy: policy.into(),
                history_commits_max,
                control_files,
                passthrough,
                driver,
                log_level,
            };
            mount(&options, foreground)
        }
        Command::Unmount { lazy, legacy: _, mountpoint } => {
            if let Some(left) = branchfs::stop(&mountpoint, lazy)? {
                eprintln!("branchfs: {left}");
            }
            Ok(())
        }
        Command::Create { parent, disk_limit, legacy: _, name, mountpoint } => {
            let request = protocol::Create {
                name: name.clone(),
                parent: Some(BranchRef::Name(parent)),
                disk_limit: disk_limit.map(NonZeroU64::get),
                lease: false,
            };
            let branch = client::request(&mountpoint, request)?;
            make_current(&mountpoint, &name)?;
            show(&branch.path.to_string())
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
            legacy: _,
            name,
            mountpoint,
        } => {
            let name = named_or_current(name, &mountpoint)?;
            let branch = BranchRef::Name(name.clone());
            let _lock = match dry_run {
                true => None,
                false => lock_exclusively(&mountpoint, &branch, "committed")?,
            };
            let request = protocol::Commit {
                branch,
                policy: policy.map(Policy::from),
                force,
                skip,
                rebase,
                only,
                exclude,
                drop_rest,
                dry_run,
            };
            let committed = client::request(&mountpoint, request)?;
            show_changes(&committed.changes)?;
            if committed.remaining > 0 && !dry_run {
                eprintln!(
                    "branchfs: branch {name} stays open: changed paths that were not committed: {}",
                    committed.remaining
                );
            }
            Ok(())
        }
        Command::Rebase { force, dry_run, name, mountpoint } => {
            let branch = BranchRef::Name(name);
            let _lock = match dry_run {
                true => None,
                false => lock_exclusively(&mountpoint, &branch, "rebased")?,
            };
            let request = protocol::Rebase { branch, force, dry_run };
            let conflicts = client::request(&mountpoint, request)?.conflicts;
            conflicts.iter().try_for_each(|path| show(&path.to_string()))
        }
        Command::Abort { legacy: _, name, mountpoint } => {
            let name = named_or_current(name, &mountpoint)?;
            let request = protocol::Abort { branch: BranchRef::Name(name) };
            client::request(&mountpoint, request).map(|_| ())
        }
        Command::List { mountpoint } => {
            for branch in client::request(&mountpoint, protocol::List {})?.branches {
                let state = match branch.state {
                    BranchState::Live => "live",
                    BranchState::Stale => "stale",
                };
                show(&format!("{}\t{state}\t{}", branch.name, branch.path))?;
            }
            Ok(())
        }
        Command::Undo { revert: UndoArgs { force, dry_run, mountpoint } } => {
            let undo = protocol::Undo { commit: None, force, dry_run };
            show_changes(&client::request(&mountpoint, undo)?.changes)
        }
        Command::Redo { revert: UndoArgs { force, dry_run, mountpoint } } => {
            let redo = protocol::Redo { commit: None, force, dry_run };
            show_changes(&client::request(&mountpoint, redo)?.changes)
        }
        Command::History { json, mountpoint } => {
            let reply = client::request(&mountpoint, protocol::History {})?;
            if json {
                return show(&serde_json::to_string(&reply)?);
            }
            for entry in reply.entries {
                let state = if entry.undone.is_none() { "committed" } else { "undone" };
                let (id, branch, changes) = (entry.id, entry.branch, entry.changes);
                show(&format!("{id}\t{state}\t{branch}\t{changes} changes"))?;
            }
            Ok(())
        }
        Command::Prune { keep, mountpoint } => {
            let request = protocol::Prune { keep: Some(keep) };
            let pruned = client::request(&mountpoint, request)?;
            show(&format!("{} commits removed, {} bytes", pruned.removed, pruned.bytes))
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

fn mount(options: &Options, foreground: bool) -> Result<()> {
    if std::env::var_os(branchfs::BACKGROUND).is_some() {
        return branchfs::run(options, branchfs::detach_and_notify);
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
    Ok(client::request(mountpoint, protocol::Info {})?.control_files)
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

fn show_changes(changes: &[Change]) -> Result<()> {
    changes.iter().try_for_each(|Change { change, path, .. }| {
        show(&format!("{:<9} {path}", cli::word(change)))
    })
}
