//! The directory that control sockets lie in: whoever may write there could put a socket of their own in the place of
//! ours, so it belongs to the daemon's user and to nobody else.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::error::{Context, Error};

/// Everybody may pass (the owner of a base need not be the daemon's user), only the daemon's user may change it.
const MODE: u32 = 0o755;

/// What others must not have of it.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Makes sure that the directory is there and ours.
///
/// # Errors
/// `Unsupported` where somebody else has made it.
pub(super) fn directory() -> Result<PathBuf, Error> {
    let path = place();
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).at(parent)?;
    }
    own(&path)?;
    Ok(path)
}

fn place() -> PathBuf {
    let user = rustix::process::geteuid();
    if user.is_root() {
        return PathBuf::from("/run/branchfs");
    }
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(directory) => PathBuf::from(directory).join("branchfs"),
        // Everybody may write there: the name tells users apart.
        None => std::env::temp_dir().join(format!("branchfs-{}", user.as_raw())),
    }
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
    fn a_directory_of_somebody_else_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("branchfs");
        own(&path).unwrap();
        own(&path).unwrap();
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
        assert!(own(&path).unwrap_err().to_string().contains("is not a directory of this user"));
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
