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
    #[error("mounting without root needs fusermount3 (Debian: apt install fuse3): {0}")]
    Helper(String),
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
    let failed = |error: io::Error| MountError::Helper(error.to_string());
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
        .map_err(failed)?;
    drop(theirs);
    if !output.status.success() {
        return Err(MountError::Helper(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
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
        .ok_or_else(|| MountError::Helper("it sent no descriptor".to_owned()))
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
}
