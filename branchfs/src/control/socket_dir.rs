//! The directory of the control sockets. Another user who could write to it could replace a socket, so only the daemon's
//! user may.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use branchfs_core::error::{Context, Error};

/// All users may enter the directory, because the owner of a base may be another user than the daemon's.
const MODE: u32 = 0o755;

/// The permissions that other users must not have.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Returns the directory, which it creates if it does not exist.
///
/// # Errors
/// `Unsupported` if it belongs to another user.
pub(super) fn directory() -> Result<PathBuf, Error> {
    let user = rustix::process::geteuid().as_raw();
    if user != 0 {
        return prepare(of_user(user));
    }
    let outside = fs::read_to_string("/proc/self/uid_map").map_or(0, |map| outside_of_root(&map));
    match prepare(PathBuf::from("/run/branchfs")) {
        // In a user namespace, /run may belong to the root user outside it.
        Err(_) if outside != 0 => prepare(of_user(outside)),
        prepared => prepared,
    }
}

fn prepare(path: PathBuf) -> Result<PathBuf, Error> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).at(parent)?;
    }
    own(&path)?;
    Ok(path)
}

fn of_user(user: u32) -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(directory) => PathBuf::from(directory).join("branchfs"),
        // All users share this directory, so the name contains the user.
        None => std::env::temp_dir().join(format!("branchfs-{user}")),
    }
}

/// Returns which user root is outside its user namespace, from the namespace's map; 0 if there is none.
fn outside_of_root(map: &str) -> u32 {
    let lines = map
        .lines()
        .map(|line| line.split_ascii_whitespace().map(str::parse).collect::<Result<Vec<u32>, _>>());
    let root = lines.flatten().find(|line| line.first() == Some(&0));
    root.and_then(|line| line.get(1).copied()).unwrap_or(0)
}

fn own(path: &Path) -> Result<(), Error> {
    match fs::DirBuilder::new().mode(MODE).create(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        other => other.at(path)?,
    }
    let found = fs::symlink_metadata(path).at(path)?;
    if !found.is_dir() || found.uid() != rustix::process::geteuid().as_raw() {
        return Err(Error::Unsupported(format!(
            "{} is not a directory of this user, so a control socket in it could be anybody's: remove it",
            path.display()
        )));
    }
    if found.mode() & WRITABLE_BY_OTHERS != 0 {
        fs::set_permissions(path, fs::Permissions::from_mode(MODE)).at(path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_of_another_user_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("branchfs");
        own(&path).unwrap();
        own(&path).unwrap();
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
        assert!(own(&path).unwrap_err().to_string().contains("is not a directory of this user"));
    }

    #[test]
    fn root_of_a_user_namespace_is_another_user_outside() {
        assert_eq!(outside_of_root("         0          0 4294967295\n"), 0);
        assert_eq!(outside_of_root("         0       1000          1\n"), 1000);
        assert_eq!(outside_of_root("  1000 1000 1\n  0 100000 65536\n"), 100_000);
        assert_eq!(outside_of_root(""), 0);
    }

    #[test]
    fn a_link_to_a_directory_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("branchfs");
        std::os::unix::fs::symlink(directory.path(), &path).unwrap();
        assert!(own(&path).unwrap_err().to_string().contains("is not a directory of this user"));
    }

    #[test]
    fn one_that_others_may_write_to_is_closed_to_them() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("branchfs");
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        own(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, MODE);
    }
}
