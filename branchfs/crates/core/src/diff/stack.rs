//! The directories and objects that a walk compares, as a merged lookup finds them ([`crate::layer_stack`]).

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;

use super::Side;
use crate::error::{Context, Error};
use crate::layer::Layer;
use crate::layer_stack::{LayerPath, LayerStack, Merged, MergedDir, is_hidden};

/// A branch's own layers over the view of its parent.
pub(super) struct Stack(LayerStack);

/// A directory of the branch's view.
#[derive(Clone, Debug)]
pub(super) struct Directory {
    /// Path in the view; empty for the root.
    pub(super) path: PathBuf,
    at: MergedDir,
    /// How many of its parts are in the branch's own layers.
    own: usize,
}

impl Directory {
    /// Whether the branch's own layers have nothing of it.
    pub(super) fn is_untouched(&self) -> bool {
        self.own == 0
    }

    /// Its path in the parent's view, if it shows through from there.
    pub(super) fn origin(&self) -> Option<&Path> {
        self.at.origin.as_deref()
    }

    /// The directory of the parent's view that shows through.
    pub(super) fn below(&self) -> Option<Self> {
        let (path, parts) = (self.at.origin.clone()?, self.at.parts[self.own..].to_vec());
        Some(Self { path, own: parts.len(), at: MergedDir { parts, origin: None } })
    }
}

/// The result of a lookup.
pub(super) enum Entry {
    Directory(Directory),
    /// An object of the stack's own layers.
    Upper(Side),
    /// An object of the parent's view, with its path there.
    Lower(Side),
}

impl Stack {
    pub(super) fn new(own: &[Arc<Layer>], below: &[Arc<Layer>]) -> Self {
        Self(LayerStack::over(own, below))
    }

    pub(super) fn root(&self) -> Directory {
        self.directory(PathBuf::new(), self.0.root())
    }

    fn directory(&self, path: PathBuf, at: MergedDir) -> Directory {
        let own = at.parts.iter().take_while(|part| self.0.is_own(&part.layer)).count();
        Directory { path, at, own }
    }

    /// Looks up `name` in `directory`.
    pub(super) fn find(&self, directory: &Directory, name: &OsStr) -> Result<Option<Entry>, Error> {
        let path = directory.path.join(name);
        let found = self.0.find(&directory.at.parts, directory.origin(), name);
        Ok(found.map_err(|error| damage(error, &path))?.map(|found| self.entry(path, found)))
    }

    /// Looks up `path` in the view.
    fn find_path(&self, path: &Path) -> Result<Option<Side>, Error> {
        let found = self.0.resolve(path).map_err(|error| damage(error, path))?;
        Ok(found.map(|found| side(path.to_path_buf(), found)))
    }

    fn entry(&self, path: PathBuf, found: Merged) -> Entry {
        if found.is_directory() {
            return Entry::Directory(self.directory(path, found.at));
        }
        match found.at.origin.clone() {
            Some(origin) => Entry::Lower(side(origin, found)),
            None => Entry::Upper(side(path, found)),
        }
    }

    /// The directory itself, with the attributes of its topmost layer.
    pub(super) fn side(&self, directory: &Directory) -> Result<Side, Error> {
        let path = &directory.path;
        let top = directory.at.parts.first().ok_or(Errno::NOENT).at(path)?.clone();
        let stat = top.layer.tree.stat(&top.path).at(path)?;
        Ok(Side::new(path.clone(), top, &stat))
    }

    /// Names that the stack's own layers have in a directory, whiteouts among them.
    pub(super) fn own_names(&self, directory: &Directory) -> Result<BTreeSet<OsString>, Error> {
        names(&directory.path, &directory.at.parts[..directory.own])
    }

    /// Names that a directory may have: each is to be looked up.
    pub(super) fn all_names(&self, directory: &Directory) -> Result<BTreeSet<OsString>, Error> {
        names(&directory.path, &directory.at.parts)
    }
}

fn names(path: &Path, parts: &[LayerPath]) -> Result<BTreeSet<OsString>, Error> {
    let mut names = BTreeSet::new();
    for part in parts {
        let listed = part.layer.tree.list(&part.path).at(path)?;
        names.extend(listed.into_iter().map(|entry| entry.name));
    }
    names.retain(|name| !is_hidden(&path.join(name)));
    Ok(names)
}

/// Looks up a path in the view of `layers`.
pub fn find_below(layers: &[Arc<Layer>], path: &Path) -> Result<Option<Side>, Error> {
    Stack::new(layers, &[]).find_path(path)
}

/// The topmost object that a lookup found, under `path` of a view.
fn side(path: PathBuf, mut found: Merged) -> Side {
    let content = found.content.take().map(|content| Box::new(side(path.clone(), *content)));
    let top = found.at.parts.swap_remove(0);
    Side { content, ..Side::new(path, top, &found.stat) }
}

fn damage(error: Errno, path: &Path) -> Error {
    if error == Errno::UCLEAN {
        let path = path.display();
        return Error::Corrupt(format!("{path} has a redirect that leads out, or no content"));
    }
    Error::Io { path: path.to_path_buf(), source: error.into() }
}
