//! Copies of layers and of their objects, with their overlay attributes.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Statx, XattrFlags};

use crate::object_copy::{copy_file, copy_metadata, create_like};
use crate::overlay::{Namespace, private_xattrs};
use crate::ownership;
use crate::rooted_dir::RootedDir;

/// Copies a layer's content completely, including overlay attributes and hard links.
pub(super) struct TreeCopy {
    from: RootedDir,
    to: RootedDir,
    /// Inode number -> first name, of objects with several.
    linked: HashMap<u64, PathBuf>,
    /// The object that is being copied.
    pub(super) current: PathBuf,
}

/// Copies of a directory that are left to do.
enum Copying {
    Directory(PathBuf),
    /// All entries were copied.
    Attributes(PathBuf),
}

impl TreeCopy {
    pub(super) fn new(from: RootedDir, to: RootedDir) -> Self {
        Self { from, to, linked: HashMap::new(), current: PathBuf::new() }
    }

    /// Copies everything below the root, and the root's attributes.
    pub(super) fn all(&mut self) -> Result<(), rustix::io::Errno> {
        let mut pending = vec![Copying::Directory(PathBuf::new())];
        while let Some(copying) = pending.pop() {
            match copying {
                Copying::Directory(directory) => {
                    let entries = self.from.list(&directory)?;
                    pending.push(Copying::Attributes(directory.clone()));
                    for entry in entries {
                        let path = directory.join(&entry.name);
                        self.current.clone_from(&path);
                        let stat = self.from.stat(&path)?;
                        if entry.kind == FileType::Directory {
                            self.to.make_directory(&path, 0o700)?;
                            // While it is empty, so that its owner can remove it after a kill.
                            ownership::set_in(&self.to, &path, ownership::of(&stat))?;
                            pending.push(Copying::Directory(path));
                        } else {
                            self.object(&path, &stat)?;
                        }
                    }
                }
                // Last: entries were made in it since.
                Copying::Attributes(directory) => {
                    let stat = self.from.stat(&directory)?;
                    self.describe(&directory, &stat)?;
                }
            }
        }
        Ok(())
    }

    fn object(&mut self, path: &Path, stat: &Statx) -> Result<(), rustix::io::Errno> {
        if stat.stx_nlink > 1 {
            if let Some(first) = self.linked.get(&stat.stx_ino) {
                return self.to.link(first, path);
            }
            self.linked.insert(stat.stx_ino, path.to_path_buf());
        }
        copy_object((&self.from, path, stat), (&self.to, path))
    }

    fn describe(&self, path: &Path, stat: &Statx) -> Result<(), rustix::io::Errno> {
        describe((&self.from, path, stat), (&self.to, path))
    }
}

/// Copies an object other than a directory, with its overlay attributes.
pub(super) fn copy_object(
    (from, path, stat): (&RootedDir, &Path, &Statx),
    (to, new): (&RootedDir, &Path),
) -> Result<(), rustix::io::Errno> {
    create_like((from, path, stat), (to, new), |copy| copy_file((from, path, stat), copy))?;
    describe((from, path, stat), (to, new))
}

/// Copies the attributes and the overlay attributes of an object.
fn describe(
    (from, path, stat): (&RootedDir, &Path, &Statx),
    (to, new): (&RootedDir, &Path),
) -> Result<(), rustix::io::Errno> {
    // Partial copies have been completed before.
    let is_partial = |name: &OsStr| {
        [Namespace::Trusted, Namespace::User].iter().any(|one| name == one.partial())
    };
    for name in private_xattrs(from, path)?.iter().filter(|name| !is_partial(name)) {
        let value = from.get_xattr(path, name)?;
        to.set_xattr(new, name, &value, XattrFlags::empty())?;
    }
    copy_metadata((from, path, stat), (to, new))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, chown};

    use super::*;

    /// Cut short at a file in the directory: a link to a first name that is not there.
    #[test]
    fn a_partial_copy_belongs_to_the_owner() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (one, other) = (from.path().join("in/one"), from.path().join("in/other"));
        fs::create_dir(from.path().join("in")).unwrap();
        fs::write(&one, "content").unwrap();
        fs::hard_link(&one, other).unwrap();
        chown(from.path().join("in"), Some(1000), Some(1000)).unwrap();
        let linked = HashMap::from([(fs::metadata(&one).unwrap().ino(), "missing".into())]);
        let open = |place: &tempfile::TempDir| RootedDir::open_root(place.path()).unwrap();
        let mut copier = TreeCopy { linked, ..TreeCopy::new(open(&from), open(&to)) };
        assert_eq!(copier.all(), Err(rustix::io::Errno::NOENT));
        assert_eq!(fs::metadata(to.path().join("in")).unwrap().uid(), 1000);
    }
}
