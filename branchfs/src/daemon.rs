//! One mount's life: open the workspace, mount, serve, and leave nothing behind.

use std::io::Write;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::control::{Control, MountInfo};
use crate::control_files::ControlFiles;
use crate::driver::{self, Constraints, DriverKind};
use crate::filesystem::{BranchFilesystem, CONTROL_XATTR};
use crate::guard::Guard;
use crate::log::{self, LogLevel};
use branchfs_core::driver::Driver;
use branchfs_core::error::{Context as _, with_causes};
use branchfs_core::mount_table;
use branchfs_core::scheduling::set_short_slice;
use branchfs_core::workspace::{Policy, Settings, Workspace};
use branchfs_fuse::Filesystem;
use branchfs_fuse::{MountOptions, Session, unmount};

/// Number of threads that serve requests, so that a slow request (fsync, a large copy-up) does not block others.
const REQUEST_THREADS: usize = 4;

/// What to mount, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// The directory to branch from.
    pub base: PathBuf,
    /// Where branches are kept; `None` is `.branching` in the base.
    pub store: Option<PathBuf>,
    /// Where to mount.
    pub mountpoint: PathBuf,
    /// What happens to siblings.
    pub policy: Policy,
    /// How many commits can be undone at most.
    pub history_commits_max: usize,
    /// Show the control files of the published BranchFS in every branch.
    pub control_files: bool,
    /// Let the kernel read and write files directly (passthrough) if possible.
    pub passthrough: bool,
    /// What presents a branch as a directory.
    pub driver: DriverKind,
    /// The lowest level that is logged.
    pub log_level: LogLevel,
}

/// Mounts and serves until the mount is gone. `ready` is called once everything answers.
///
/// # Errors
/// Whatever stood in the way, as one sentence; nothing is mounted then.
pub fn run(options: &Options, ready: impl FnOnce() + Send) -> Result<()> {
    log::begin(options.log_level);
    tracing::info!(
        "branchfs {} starts, process {}: base {}, mountpoint {}, driver {:?}, policy {}, history {}{}{}{}",
        env!("CARGO_PKG_VERSION"),
        std::process::id(),
        options.base.display(),
        options.mountpoint.display(),
        options.driver,
        options.policy.name(),
        options.history_commits_max,
        options
            .store
            .as_ref()
            .map_or(String::new(), |store| format!(", store {}", store.display())),
        if options.control_files { ", control files" } else { "" },
        if options.passthrough { "" } else { ", no passthrough" },
    );
    run_logged(options, ready)
        .inspect(|()| tracing::info!("unmounted"))
        .inspect_err(|error| tracing::error!("the daemon ends: {}", with_causes(error.as_ref())))
}

fn run_logged(options: &Options, ready: impl FnOnce() + Send) -> Result<()> {
    clear_dead(&options.mountpoint)?;
    let mountpoint = std::fs::canonicalize(&options.mountpoint).with_context(|| {
        format!("the mountpoint {} cannot be used", options.mountpoint.display())
    })?;
    if !mountpoint.is_dir() {
        bail!("the mountpoint {} is not a directory", mountpoint.display());
    }
    let base = std::fs::canonicalize(&options.base)
        .with_context(|| format!("the base {} cannot be used", options.base.display()))?;
    if mountpoint.starts_with(&base) {
        bail!(
            "the mountpoint {} is inside the base {}: choose one outside, or the mount would contain itself",
            mountpoint.display(),
            base.display()
        );
    }
    rustix::process::umask(rustix::fs::Mode::empty());
    make_room_for_open_files();
    set_short_slice();
    let settings = Settings {
        policy: options.policy,
        history_commits_max: options.history_commits_max,
        is_recovery: false,
        open_log: log::open_in_store,
    };
    let workspace = Arc::new(Workspace::open(&base, options.store.as_deref(), settings)?);
    for line in workspace.recovery() {
        tracing::warn!("recovery: {line}");
        eprintln!("branchfs: {line}");
    }
    let circumstances = Constraints {
        has_first_winner: options.policy == Policy::FirstWinner,
        has_control_files: options.control_files,
        is_store_elsewhere: workspace.is_external(),
    };
    let places = (workspace.base(), workspace.store(), mountpoint.as_path());
    let chosen = match driver::choose(options.driver, &circumstances, places) {
        Ok(chosen) => chosen,
        Err(error) => {
            workspace.close()?;
            return Err(error.into());
        }
    };
    let reason = &chosen.why_not;
    if chosen.driver.name() == "fuse" && options.driver != DriverKind::Fuse {
        tracing::warn!("the driver is fuse, not overlay: {reason}");
    } else {
        tracing::info!("the driver is {}: {reason}", chosen.driver.name());
    }
    let control = Control::listen()?;
    let socket = control.path().to_path_buf();
    let info = MountInfo {
        mountpoint,
        policy: options.policy,
        control_files: options.control_files,
        driver: chosen.driver.name(),
        why_not: chosen.why_not,
    };
    let filesystem = Arc::new(BranchFilesystem::new(Arc::clone(workspace.mount())));
    if options.control_files {
        let control_files = ControlFiles::new(Arc::downgrade(&workspace));
        filesystem.views.show_control_files(Box::new(control_files));
    }
    let served = serve(&workspace, &filesystem, info, control, chosen.driver, options, ready);
    // The socket's directory is shared with other mounts and stays.
    std::fs::remove_file(&socket)
        .with_context(|| format!("{} cannot be removed", socket.display()))?;
    // Also after a failure: a mount that was not made leaves no store behind.
    let closed = workspace.close();
    let guard = served?;
    closed?;
    // Where something failed the guard stays, and looks for an interrupted transaction when this process is gone.
    if let Some(guard) = guard {
        guard.dismiss();
    }
    Ok(())
}

fn serve(
    workspace: &Arc<Workspace>,
    filesystem: &Arc<BranchFilesystem>,
    info: MountInfo,
    control: Control,
    driver: Box<dyn Driver>,
    options: &Options,
    ready: impl FnOnce() + Send,
) -> Result<Option<Guard>> {
    let passthrough = options.passthrough;
    if driver.is_for(None) {
        workspace.mount().disable_epoch();
    }
    let stacking = if passthrough { Some(stacking_below(workspace.store())?) } else { None };
    if passthrough {
        let probe = workspace.store().join("format");
        let probe =
            branchfs_core::no_follow::open_file(&probe, rustix::fs::OFlags::RDONLY).at(&probe)?;
        filesystem.passthrough.offer(probe.into());
    }
    let mount =
        MountOptions { source: workspace.base(), subtype: "branchfs", passthrough_depth: stacking };
    let session = Session::mount(&info.mountpoint, &mount)?;
    let private = [workspace.base(), workspace.store(), control.path()];
    filesystem.connect(session.notifier(), control.path(), &private);
    let (served, at) = (Arc::clone(workspace), info.mountpoint.clone());
    control.serve(served, Arc::clone(filesystem), info)?;
    let mut signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    let mounted_at = at.clone();
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for signal in signals.forever() {
            tracing::info!("signal {signal}: unmounting");
            if let Err(error) = unmount(&mounted_at, true) {
                // The mount goes on.
                tracing::error!("{} cannot be unmounted: {error}", mounted_at.display());
            }
        }
    })?;
    let handler: Arc<dyn Filesystem> = filesystem.clone();
    thread::scope(|scope| {
        // Branches are presented through the mount, which must be served meanwhile.
        let presented = scope.spawn(|| {
            let presented = workspace.attach_all(driver);
            match &presented {
                Ok(messages) => {
                    for message in messages {
                        tracing::warn!("{message}");
                        eprintln!("branchfs: {message}");
                    }
                    tracing::info!("mounted at {}", at.display());
                    ready();
                }
                Err(_) => unmount(&at, true)?,
            }
            presented?;
            // The guard is started in the background, because only transactions need it.
            let guard = Guard::start(workspace, options.history_commits_max, options.log_level);
            let guard = guard.inspect_err(|error| {
                tracing::warn!("there is no guard, the next mount would recover: {error}");
            });
            anyhow::Ok(guard.ok())
        });
        let served = session.serve(&handler, REQUEST_THREADS);
        let guard =
            presented.join().map_err(|_| anyhow::anyhow!("presenting the branches panicked"))??;
        served?;
        Ok(guard)
    })
}

/// Unmounts what a killed daemon has left mounted at `mountpoint`, and the branches mounted below it. Other mounts are
/// not touched.
fn clear_dead(mountpoint: &Path) -> Result<()> {
    if let Some(dead) = mount_table::dead_mount(mountpoint)? {
        unmount(&dead, true).at(&dead)?;
    }
    Ok(())
}

/// Maximum stacking depth of backing files: one more if the store is on a stacked file system itself. Not more than
/// needed, because it reduces the depth left for file systems on top of ours.
fn stacking_below(store: &Path) -> Result<u32> {
    const STACKED: [i64; 3] = [
        0x794c_7630, // overlayfs
        0x6573_5546, // FUSE
        0xf15f,      // eCryptfs
    ];
    let found = rustix::fs::statfs(store).with_context(|| store.display().to_string())?;
    Ok(if STACKED.contains(&found.f_type) { 2 } else { 1 })
}

/// Enlarges the descriptor table while there is one thread. Every open file in a branch is a descriptor of the daemon.
/// The kernel doubles a full table, which takes an RCU grace period (10 ms) with several threads.
fn make_room_for_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    const ROOM: RawFd = 4096; // 33 KB of the kernel's memory
    let limit = getrlimit(Resource::Nofile);
    // Raising the soft limit to the hard one is always allowed; where it fails, opens fail with EMFILE as they would.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    // If the limit is lower, or standard input is closed, the table grows later.
    let _ = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), ROOM - 1);
}

/// Runs the daemon in the background: returns when the mount answers, or with the error that kept it from that.
///
/// # Errors
/// As [`run`].
pub fn start(arguments: &[std::ffi::OsString]) -> Result<()> {
    use std::io::Read;
    use std::process::{Command, Stdio};
    let program = std::env::current_exe()
        .context("this program's own path is not known (is /proc mounted?)")?;
    let mut child = Command::new(program)
        .args(arguments)
        .env(BACKGROUND, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    // One byte on its standard output reports that it is ready; an end without it is a failure, described on standard error.
    let mut byte = [0; 1];
    let ready = child.stdout.take().map_or(Ok(0), |mut output| output.read(&mut byte))?;
    let mut message = String::new();
    if let Some(mut errors) = child.stderr.take() {
        errors.read_to_string(&mut message)?; // up to the point where the daemon lets go of it
    }
    if ready == 1 {
        eprint!("{message}");
        return Ok(());
    }
    child.wait()?;
    let message = message.trim().trim_start_matches("branchfs: ");
    bail!(
        "{}",
        if message.is_empty() { "the daemon exited without an error message" } else { message }
    )
}

/// Set in the environment of a daemon that was started in the background.
pub const BACKGROUND: &str = "BRANCHFS_BACKGROUND";

/// Notifies the process that started the daemon that the mount is ready, and detaches from its terminal.
pub fn detach_and_notify() {
    // The session of the starting terminal must not take the daemon with it.
    let _ = rustix::process::setsid();
    let mut output = std::io::stdout();
    // If the starting process has exited, the byte is not needed.
    let _ = output.write_all(b"1").and_then(|()| output.flush());
    if let Ok(null) = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdout(&null);
        if !log::take_stderr() {
            let _ = rustix::stdio::dup2_stderr(&null);
        }
    }
    let _ = std::env::set_current_dir("/"); // keeps no directory busy
}

/// Unmounts and waits until the daemon has cleaned up. Returns a message if other mount namespaces have a copy of the
/// mount, which the daemon serves until they unmount it.
///
/// # Errors
/// It is not a BranchFS mount, or it is in use.
pub fn stop(mountpoint: &Path, lazily: bool) -> Result<Option<String>> {
    let socket = control_socket(mountpoint)?;
    let device = std::os::unix::fs::MetadataExt::dev(&std::fs::metadata(mountpoint)?);
    let daemon: Option<i32> = socket
        .file_stem()
        .and_then(|stem| std::str::from_utf8(stem.as_bytes()).ok())
        .and_then(|pid| pid.parse().ok());
    let waiter = daemon.and_then(rustix::process::Pid::from_raw).and_then(|pid| {
        rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok()
    });
    if !lazily && mount_table::has_branch_mounts(&std::fs::canonicalize(mountpoint)?) {
        // The branches are mounts of their own: only the daemon can put them back where one of them is in use.
        ask_to_unmount(&socket)?;
        return waiter
            .map_or(Ok(None), |waiter| wait_for_end(mountpoint, device, &socket, &waiter));
    }
    patiently(|| unmount(mountpoint, lazily)).map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) => anyhow::anyhow!(
            "{} is in use: end the processes that have files or their working directory in it, or unmount with --lazy",
            mountpoint.display()
        ),
        _ => anyhow::anyhow!("{} cannot be unmounted: {error}", mountpoint.display()),
    })?;
    match waiter {
        Some(waiter) if !lazily => wait_for_end(mountpoint, device, &socket, &waiter),
        _ => Ok(None),
    }
}

/// Asks the daemon to end. It may be gone before its answer is.
fn ask_to_unmount(socket: &Path) -> Result<()> {
    use std::io::{BufRead, BufReader};
    let mut stream = std::os::unix::net::UnixStream::connect(socket)
        .with_context(|| format!("the daemon does not answer at {}", socket.display()))?;
    writeln!(stream, "{}", serde_json::json!({ "v": 1, "verb": "unmount" }))?;
    let mut line = String::new();
    let answered = BufReader::new(stream).read_line(&mut line);
    let reply: serde_json::Value = match answered {
        Ok(length) if length > 0 => serde_json::from_str(&line)?,
        _ => return Ok(()),
    };
    match reply["error"]["message"].as_str() {
        Some(message) => bail!("{message}, or unmount with --lazy"),
        None => Ok(()),
    }
}

/// Waits until a daemon whose mount is gone has cleaned up, but not for other mount namespaces.
fn wait_for_end(
    mountpoint: &Path,
    device: u64,
    socket: &Path,
    daemon: &std::os::fd::OwnedFd,
) -> Result<Option<String>> {
    const CLOSING_MAX: Duration = Duration::from_secs(30);
    /// A container that is being started has a copy of every mount for a moment.
    const COPIES_MAX: Duration = Duration::from_secs(5);
    const POLL: rustix::time::Timespec = rustix::time::Timespec { tv_sec: 0, tv_nsec: 250_000_000 };
    let start = Instant::now();
    loop {
        let mut poll = [rustix::event::PollFd::new(daemon, rustix::event::PollFlags::IN)];
        if rustix::event::poll(&mut poll, Some(&POLL))? > 0 {
            return Ok(None);
        }
        if start.elapsed() < COPIES_MAX {
            continue;
        }
        // The socket goes when no copy is left. From then on the device may be that of another mount.
        let users = if socket.exists() { mount_table::users_elsewhere(device) } else { Vec::new() };
        if !users.is_empty() {
            let users: Vec<String> =
                users.into_iter().map(|(pid, name)| format!("{pid} ({name})")).collect();
            return Ok(Some(format!(
                "{} is unmounted, but other mount namespaces have a copy of it: the daemon serves them, and the store stays in use, until these processes end or unmount theirs: {}",
                mountpoint.display(),
                users.join(", ")
            )));
        }
        if start.elapsed() > CLOSING_MAX {
            bail!(
                "{} is unmounted, but its daemon has not ended after 30 seconds",
                mountpoint.display()
            );
        }
    }
}

/// Tries again for a moment while something is in use: whatever looks at all mounts of a machine (`df`, a monitor, a
/// container being started) holds each for an instant.
fn patiently(action: impl Fn() -> std::io::Result<()>) -> std::io::Result<()> {
    const BUSY_WAIT_MAX: Duration = Duration::from_secs(2);
    const BUSY_POLL: Duration = Duration::from_millis(10);
    let deadline = Instant::now() + BUSY_WAIT_MAX;
    loop {
        match action() {
            Err(error)
                if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline =>
            {
                thread::sleep(BUSY_POLL);
            }
            other => return other,
        }
    }
}

/// Returns the control socket of a mount.
///
/// # Errors
/// It is not a BranchFS mount.
pub fn control_socket(mountpoint: &Path) -> Result<PathBuf> {
    if !mount_table::is_root_of_mount(mountpoint)? {
        bail!("{} is not a BranchFS mount", mountpoint.display());
    }
    let mut value = vec![0; 4096];
    let length =
        rustix::fs::getxattr(mountpoint, CONTROL_XATTR, value.as_mut_slice())
            .map_err(|error| match error {
                rustix::io::Errno::NOTCONN => anyhow::anyhow!(
                    "the daemon of {} is gone; its branches are kept in the store\nHint: 'branchfs log BASE' prints its log; mount the base again to recover",
                    mountpoint.display()
                ),
                error => {
                    anyhow::anyhow!("{} is not a BranchFS mount ({error})", mountpoint.display())
                }
            })?;
    value.truncate(length);
    Ok(PathBuf::from(std::ffi::OsStr::from_bytes(&value)))
}
