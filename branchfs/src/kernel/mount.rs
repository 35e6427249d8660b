//! Making and ending the mount: directly where the process may mount, else through `fusermount3`.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

/// The mount could not be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MountError {
    #[error(
        "there is no /dev/fuse: load the kernel's fuse module, or run the container with --device /dev/fuse"
    )]
    NoDevice,
    #[error(
        "/dev/fuse cannot be opened: {0}; run as root, or give this user read and write access to it"
    )]
    Device(Errno),
    #[error("mounting at {} is not permitted; run the container with --cap-add SYS_ADMIN --security-opt apparmor:unconfined", mountpoint.display())]
    NotPermitted { mountpoint: PathBuf },
    #[error("cannot mount at {}: {errno}", mountpoint.display())]
    Refused { mountpoint: PathBuf, errno: Errno },
    #[error(
        "mounting without root needs fusermount3, which is not installed (Debian: apt install fuse3)"
    )]
    NoHelper,
    #[error("{said}{}", helper_advice(.said))]
    Helper { said: String },
}

/// Mounts at `mountpoint` and returns the connection to the kernel. The mount table shows `source` as the mount's
/// source.
pub(crate) fn mount(mountpoint: &Path, source: &Path) -> Result<OwnedFd, MountError> {
    if !rustix::process::geteuid().is_root() {
        return mount_by_helper(mountpoint, source);
    }
    let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|error| match error {
            Errno::NOENT | Errno::NXIO | Errno::NODEV => MountError::NoDevice,
            error => MountError::Device(error),
        })?;
    // Every user may enter; the kernel checks permissions by mode, owner and ACL as on any file system.
    let data = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other",
        device.as_raw_fd()
    );
    let data = std::ffi::CString::new(data)
        .map_err(|_| MountError::Refused { mountpoint: mountpoint.into(), errno: Errno::INVAL })?;
    rustix::mount::mount(source, mountpoint, "fuse.branchfs", MountFlags::empty(), data.as_c_str())
        .map_err(|error| match error {
            Errno::PERM | Errno::ACCESS => {
                MountError::NotPermitted { mountpoint: mountpoint.into() }
            }
            errno => MountError::Refused { mountpoint: mountpoint.into(), errno },
        })?;
    Ok(device)
}

/// `fusermount3` mounts and sends the descriptor back over a socket (`_FUSE_COMMFD`).
fn mount_by_helper(mountpoint: &Path, source: &Path) -> Result<OwnedFd, MountError> {
    use rustix::net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags,
        SocketType,
    };
    let failed = |error: io::Error| MountError::Helper { said: format!("fusermount3: {error}") };
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(|error| failed(error.into()))?;
    rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty())
        .map_err(|error| failed(error.into()))?;
    let output = Command::new("fusermount3")
        .arg("-o")
        .arg(helper_options(source))
        .arg("--")
        .arg(mountpoint)
        .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string())
        .output()
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => MountError::NoHelper,
            _ => failed(error),
        })?;
    drop(theirs);
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(MountError::Helper { said });
    }
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0; 1];
    let mut parts = [io::IoSliceMut::new(&mut byte)];
    rustix::net::recvmsg(&ours, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
        .map_err(|error| failed(error.into()))?;
    control
        .drain()
        .find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        })
        .ok_or_else(|| MountError::Helper { said: "fusermount3 sent no descriptor".to_owned() })
}

/// What to do about a refusal of `fusermount3`, by its own words.
fn helper_advice(said: &str) -> &'static str {
    let said = said.to_ascii_lowercase();
    if said.contains("username") {
        "; fusermount3 mounts only for users with an entry in /etc/passwd: add one, or mount as root"
    } else if said.contains("/dev/fuse") && said.contains("permission denied") {
        "; run as root, or give this user read and write access to /dev/fuse"
    } else if said.contains("/dev/fuse") {
        "; load the kernel's fuse module, or run the container with --device /dev/fuse"
    } else {
        ""
    }
}

/// The options for `fusermount3`, which takes a comma after a backslash as part of a value.
fn helper_options(source: &Path) -> OsString {
    let mut options = b"fsname=".to_vec();
    for byte in source.as_os_str().as_bytes() {
        if matches!(byte, b',' | b'\\') {
            options.push(b'\\');
        }
        options.push(*byte);
    }
    options.extend_from_slice(b",subtype=branchfs,default_permissions");
    OsString::from_vec(options)
}

/// Ends a mount. `lazily`: it vanishes at once, and is gone when its last user is.
pub(crate) fn unmount(mountpoint: &Path, lazily: bool) -> io::Result<()> {
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
        let options = helper_options(Path::new("/a,b\\c d"));
        assert_eq!(options, r"fsname=/a\,b\\c d,subtype=branchfs,default_permissions");
    }

    #[test]
    fn only_a_missing_helper_is_to_be_installed() {
        let user = "fusermount3: could not determine username: uid 4321";
        let device = "fusermount3: failed to open /dev/fuse: Permission denied";
        let other = "fusermount3: user has no write access to mountpoint /m";
        for (said, advice) in [
            (user, "add one, or mount as root"),
            (device, "give this user read and write access to /dev/fuse"),
            (other, other),
        ] {
            let shown = MountError::Helper { said: said.to_owned() }.to_string();
            assert!(shown.starts_with(said) && shown.ends_with(advice), "{shown}");
            assert!(!shown.contains("fuse3)"), "{shown}");
        }
        assert!(MountError::NoHelper.to_string().contains("apt install fuse3"));
    }
}
