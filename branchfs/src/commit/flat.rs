//! One layer out of several, for branches that took in commits of their children and moved directories.
//!
//! The layers of such a branch name directories as the layer below shows them: `third` comes from `right`, which came
//! from `left`. A plan knows the base alone. So before it is worked out, the layers are laid over one another in a
//! directory of the topmost: objects are linked there, not copied, and each directory says where in the base it comes
//! from. If the commit fails, that directory goes and the layers are as they were; if it succeeds, the layers' own names
//! for what is now in the base go (see `Workspace::unlink_kept`).
//!
//! Cost: one link for each changed name, and only where a directory moved.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Statx, XattrFlags};

use super::step::{Disk, Place};
use crate::error::{Context, Error};
use crate::layer::{copy_metadata, times};
use crate::overlay::{DEVICE_XATTR, Namespace, may_be_whiteout, parse_redirect};

/// Whether the layers can only be understood together: there are several, and one moves a directory.
pub(crate) fn is_needed(
    disk: &Disk,
    layers: &[PathBuf],
    namespace: Namespace,
) -> Result<bool, Error> {
    if layers.len() < 2 {
        return Ok(false);
    }
    for layer in layers {
        let mut pending = vec![layer.clone()];
        while let Some(directory) = pending.pop() {
            for entry in disk.list(&Place::Store(directory.clone()))? {
                if entry.kind != FileType::Directory {
                    continue;
                }
                let path = directory.join(&entry.name);
                if disk.xattr(&Place::Store(path.clone()), namespace.redirect()).is_some() {
                    return Ok(true);
                }
                pending.push(path);
            }
        }
    }
    Ok(false)
}

/// Lays `layers` (directories of the store, top first) over one another in `to`, a free name in the store.
pub(crate) fn flatten(
    disk: &Disk,
    layers: &[PathBuf],
    namespace: Namespace,
    to: &Path,
) -> Result<(), Error> {
    let sources = layers
        .iter()
        .enumerate()
        .map(|(layer, path)| Source { path: path.clone(), shown: PathBuf::new(), layer })
        .collect();
    let root = Merged { sources, base: Some(PathBuf::new()) };
    disk.store.make_directory(to, 0o700).at(to)?;
    Flattener { disk, layers, namespace }.fill(&root, to)
}

/// A directory of one layer.
#[derive(Clone, Debug)]
struct Source {
    /// In the store.
    path: PathBuf,
    /// Within the layer: what a relative redirect starts from.
    shown: PathBuf,
    /// Position in the stack.
    layer: usize,
}

/// A directory of several layers, top first, and the base's directory below them, if it shows through.
#[derive(Clone, Debug)]
struct Merged {
    sources: Vec<Source>,
    base: Option<PathBuf>,
}

/// What the layers have under a name.
enum Found {
    Whiteout,
    Object(PathBuf),
    Directory(Merged),
}

struct Flattener<'f> {
    disk: &'f Disk,
    layers: &'f [PathBuf],
    namespace: Namespace,
}

impl Flattener<'_> {
    fn fill(&self, merged: &Merged, to: &Path) -> Result<(), Error> {
        let mut names: BTreeSet<OsString> = BTreeSet::new();
        for source in &merged.sources {
            let entries = self.disk.list(&Place::Store(source.path.clone()))?;
            names.extend(entries.into_iter().map(|entry| entry.name));
        }
        let store = &self.disk.store;
        for name in names {
            let new = to.join(&name);
            match self.find(merged, &name)? {
                Some(Found::Object(path)) => store.link(&path, &new).at(&new)?,
                Some(Found::Whiteout) if self.in_base(merged, &name)?.is_some() => {
                    store.make_node(&new, libc::S_IFCHR, 0).at(&new)?;
                }
                // What it hid may be gone with the directory it was in.
                Some(Found::Whiteout) | None => {}
                Some(Found::Directory(inner)) => {
                    store.make_directory(&new, 0o700).at(&new)?;
                    self.fill(&inner, &new)?;
                    self.mark(&inner, merged, &name, &new)?;
                }
            }
        }
        // Last of all: everything before touches its times.
        let Some(top) = merged.sources.first() else { return Ok(()) };
        let stat = store.stat(&top.path).at(&top.path)?;
        copy_metadata((store, &top.path, &stat), (store, to)).at(to)?;
        store.set_times(to, &times(&stat)).at(to)
    }

    /// Says where in the base a directory comes from, where its name alone does not say it.
    fn mark(&self, inner: &Merged, outer: &Merged, name: &OsStr, new: &Path) -> Result<(), Error> {
        let by_name = outer.base.as_ref().map(|base| base.join(name));
        let set = |mark: &str, value: &[u8]| {
            let mark = OsStr::new(mark);
            self.disk.store.set_xattr(new, mark, value, XattrFlags::empty()).at(new)
        };
        match &inner.base {
            Some(origin) if Some(origin) == by_name.as_ref() => Ok(()),
            Some(origin) => {
                let absolute = Path::new("/").join(origin);
                set(self.namespace.redirect(), absolute.as_os_str().as_encoded_bytes())
            }
            None if self.in_base(outer, name)?.is_some() => set(self.namespace.opaque(), b"y"),
            None => Ok(()),
        }
    }

    fn in_base(&self, merged: &Merged, name: &OsStr) -> Result<Option<Statx>, Error> {
        match &merged.base {
            Some(base) => self.disk.stat(&Place::Base(base.join(name))),
            None => Ok(None),
        }
    }

    /// The base's directory under a name, if it has one and nothing hides it.
    fn base_directory(&self, merged: &Merged, name: &OsStr) -> Result<Option<PathBuf>, Error> {
        let is_directory =
            self.in_base(merged, name)?.is_some_and(|stat| kind_of(&stat) == FileType::Directory);
        Ok(merged.base.as_ref().filter(|_| is_directory).map(|base| base.join(name)))
    }

    fn find(&self, merged: &Merged, name: &OsStr) -> Result<Option<Found>, Error> {
        let mut sources = Vec::new();
        for source in &merged.sources {
            let (path, shown) = (source.path.join(name), source.shown.join(name));
            let place = Place::Store(path.clone());
            let Some(stat) = self.disk.stat(&place)? else { continue };
            let is_whiteout =
                may_be_whiteout(&stat) && self.disk.xattr(&place, DEVICE_XATTR).is_none();
            if is_whiteout || kind_of(&stat) != FileType::Directory {
                return Ok(Some(match (sources.is_empty(), is_whiteout) {
                    (true, true) => Found::Whiteout,
                    (true, false) => Found::Object(path),
                    // It ends what shows through the directories above it.
                    (false, _) => Found::Directory(Merged { sources, base: None }),
                }));
            }
            sources.push(Source { path, shown: shown.clone(), layer: source.layer });
            if self.disk.xattr(&place, self.namespace.opaque()).is_some_and(|value| value == b"y") {
                return Ok(Some(Found::Directory(Merged { sources, base: None })));
            }
            if let Some(value) = self.disk.xattr(&place, self.namespace.redirect()) {
                let origin = parse_redirect(&value, &shown).ok_or_else(|| {
                    Error::Corrupt(format!("{} has a redirect that leads out", shown.display()))
                })?;
                let below = self.resolve(source.layer + 1, &origin)?;
                sources.extend(below.sources);
                return Ok(Some(Found::Directory(Merged { sources, base: below.base })));
            }
        }
        if sources.is_empty() {
            return Ok(None);
        }
        let base = self.base_directory(merged, name)?;
        Ok(Some(Found::Directory(Merged { sources, base })))
    }

    /// The directory that the layers from `first` on, and the base, show at `path`.
    fn resolve(&self, first: usize, path: &Path) -> Result<Merged, Error> {
        let root = |(layer, path): (usize, &PathBuf)| Source {
            path: path.clone(),
            shown: PathBuf::new(),
            layer,
        };
        let mut at = Merged {
            sources: self.layers.iter().enumerate().skip(first).map(root).collect(),
            base: Some(PathBuf::new()),
        };
        for name in path {
            at = match self.find(&at, name)? {
                Some(Found::Directory(merged)) => merged,
                Some(_) => Merged { sources: Vec::new(), base: None },
                None => Merged { sources: Vec::new(), base: self.base_directory(&at, name)? },
            };
        }
        Ok(at)
    }
}

fn kind_of(stat: &Statx) -> FileType {
    FileType::from_raw_mode(u32::from(stat.stx_mode))
}
