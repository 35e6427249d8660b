//! Mounting and unmounting: directly if the process may, else with `fusermount3`.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

/// Options of a mount.
#[derive(Clone, Copy, Debug)]
pub struct MountOptions<'a> {
    /// The source that the mount table shows.
    pub source: &'a Path,
    /// The mount table shows the type `fuse.SUBTYPE`. No comma, backslash or NUL.
    pub subtype: &'a str,
    /// How many stacked filesystems may lie below a backing file; `None` disables backing files.
    pub passthrough_depth: Option<u32>,
}

/// Why a filesystem cannot be mounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// There is no `/dev/fuse`.
    #[error(
        "there is no /dev/fuse: load the kernel's fuse module, or run the container with --device /dev/fuse"
    )]
    NoDevice,
    /// `/dev/fuse` cannot be opened.
    #[error(
        "/dev/fuse cannot be opened: {0}; run as root, or give this user read and write access to it"
    )]
    Device(Errno),
    /// The process may not mount.
    #[error("mounting at {} is not permitted; run the container with --cap-add SYS_ADMIN --security-opt apparmor:unconfined", mountpoint.display())]
    NotPermitted {
        /// Where to mount.
        mountpoint: PathBuf,
    },
    /// `mount(2)` failed.
    #[error("cannot mount at {}: {errno}", mountpoint.display())]
    Refused {
        /// Where to mount.
        mountpoint: PathBuf,
        /// The error of `mount(2)`.
        errno: Errno,
    },
    /// `fusermount3` is not installed.
    #[error(
        "mounting without root needs fusermount3, which is not installed (Debian: apt install fuse3)"
    )]
    NoHelper,
    /// `fusermount3` failed, with this message.
    #[error("{message}{}", helper_advice(.message))]
    Helper {
        /// The output of `fusermount3`.
        message: String,
    },
}

/// Mounts at `mountpoint` and returns the connection to the kernel.
pub(crate) fn mount(mountpoint: &Path, options: &MountOptions<'_>) -> Result<OwnedFd, MountError> {
    if !rustix::process::geteuid().is_root() {
        return mount_by_helper(mountpoint, options);
    }
    let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|error| match error {
            Errno::NOENT | Errno::NXIO | Errno::NODEV => MountError::NoDevice,
            error => MountError::Device(error),
        })?;
    // All users have access; the kernel checks permissions by mode, owner and ACL as on any filesystem.
    let data = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other",
        device.as_raw_fd()
    );
    let data = std::ffi::CString::new(data)
        .map_err(|_| MountError::Refused { mountpoint: mountpoint.into(), errno: Errno::INVAL })?;
    let kind = format!("fuse.{}", options.subtype);
    rustix::mount::mount(options.source, mountpoint, kind, MountFlags::empty(), data.as_c_str())
        .map_err(|error| match error {
            Errno::PERM | Errno::ACCESS => {
                MountError::NotPermitted { mountpoint: mountpoint.into() }
            }
            errno => MountError::Refused { mountpoint: mountpoint.into(), errno },
        })?;
    Ok(device)
}

/// Mounts with `fusermount3`, which sends the descriptor back over a socket (`_FUSE_COMMFD`).
fn mount_by_helper(mountpoint: &Path, options: &MountOptions<'_>) -> Result<OwnedFd, MountError> {
    use rustix::net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags,
        SocketType,
    };
    let failed = |error: io::Error| MountError::Helper { message: format!("fusermount3: {error}") };
    let (socket, helper_socket) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(|error| failed(error.into()))?;
    rustix::io::fcntl_setfd(&helper_socket, rustix::io::FdFlags::empty())
        .map_err(|error| failed(error.into()))?;
    let output = Command::new("fusermount3")
        .arg("-o")
        .arg(helper_options(options))
        .arg("--")
        .arg(mountpoint)
        .env("_FUSE_COMMFD", helper_socket.as_raw_fd().to_string())
        .output()
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => MountError::NoHelper,
            _ => failed(error),
        })?;
    drop(helper_socket);
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(MountError::Helper { message });
    }
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0; 1];
    let mut parts = [io::IoSliceMut::new(&mut byte)];
    rustix::net::recvmsg(&socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
        .map_err(|error| failed(error.into()))?;
    control
        .drain()
        .find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        })
        .ok_or_else(|| MountError::Helper { message: "fusermount3 sent no descriptor".to_owned() })
}

/// Returns how to fix a failure of `fusermount3`, judged by its message.
fn helper_advice(message: &str) -> &'static str {
    let message = message.to_ascii_lowercase();
    if message.contains("username") {
        "; fusermount3 mounts only for users with an entry in /etc/passwd: add one, or mount as root"
    } else if message.contains("/dev/fuse") && message.contains("permission denied") {
        "; run as root, or give this user read and write access to /dev/fuse"
    } else if message.contains("/dev/fuse") {
        "; load the kernel's fuse module, or run the container with --device /dev/fuse"
    } else {
        ""
    }
}

/// Returns the options of `fusermount3`. A backslash escapes a comma.
fn helper_options(options: &MountOptions<'_>) -> OsString {
    let mut text = b"fsname=".to_vec();
    for byte in options.source.as_os_str().as_bytes() {
        if matches!(byte, b',' | b'\\') {
            text.push(b'\\');
        }
        text.push(*byte);
    }
    text.extend_from_slice(format!(",subtype={},default_permissions", options.subtype).as_bytes());
    OsString::from_vec(text)
}

/// Unmounts. With `lazily` the mount disappears immediately and ends when nothing uses it any more (`MNT_DETACH`).
///
/// # Errors
/// `EBUSY` if it is in use and `lazily` is false. Without root this runs `fusermount3`, whose message is the error.
pub fn unmount(mountpoint: &Path, lazily: bool) -> io::Result<()> {
    let flags = if lazily { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(mountpoint, flags | UnmountFlags::NOFOLLOW) {
        Err(Errno::PERM) => {
            let mut helper = Command::new("fusermount3");
            helper.arg("-u");
            if lazily {
                helper.arg("-z");
            }
            let output = helper.arg("--").arg(mountpoint).output()?;
            if output.status.success() {
                return Ok(());
            }
            Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
        }
        other => Ok(other?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_and_backslashes_of_a_source_are_escaped_for_fusermount() {
        let source = Path::new("/a,b\\c d");
        let options = MountOptions { source, subtype: "sub", passthrough_depth: None };
        let expected = r"fsname=/a\,b\\c d,subtype=sub,default_permissions";
        assert_eq!(helper_options(&options), expected);
    }

    #[test]
    fn only_a_missing_helper_leads_to_advice_to_install_it() {
        let user = "fusermount3: could not determine username: uid 4321";
        let device = "fusermount3: failed to open /dev/fuse: Permission denied";
        let other = "fusermount3: user has no write access to mountpoint /m";
        for (message, advice) in [
            (user, "add one, or mount as root"),
            (device, "give this user read and write access to /dev/fuse"),
            (other, other),
        ] {
            let shown = MountError::Helper { message: message.to_owned() }.to_string();
            assert!(shown.starts_with(message) && shown.ends_with(advice), "{shown}");
            assert!(!shown.contains("fuse3)"), "{shown}");
        }
        assert!(MountError::NoHelper.to_string().contains("apt install fuse3"));
    }
}
