//! The layers through which a branch is seen, and the merged lookup in them.
//!
//! Only this file knows how layers hide each other ([`crate::overlay`]): a whiteout, or an object other than a
//! directory, ends a lookup; an opaque directory hides those below it; a redirect goes on at another path below.
//!
//! A stack may have two sections: the own layers of a branch, and those of its parent below them. A lookup then returns
//! the path at which the parent shows what it found, too. That distinguishes a renamed directory from a new one.

use std::ffi::OsStr;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FileType, Statx};
use rustix::io::Errno;

use crate::layer::Layer;
use crate::overlay::{Below, Redirect};
use crate::rooted_dir::Result;
use crate::write_set::{Precondition, Read};

/// The store's directory in the base, hidden from every view.
pub const HIDDEN: &str = ".branching";

/// Whether a path relative to the base is the store. No other name is reserved.
pub(crate) fn is_hidden(base_path: &Path) -> bool {
    base_path.as_os_str() == HIDDEN
}

/// A path in one layer.
#[derive(Clone, Debug)]
pub struct LayerPath {
    /// The layer.
    pub layer: Arc<Layer>,
    /// The path in the layer.
    pub path: PathBuf,
}

/// A directory of a stack.
#[derive(Clone, Debug)]
pub(crate) struct MergedDir {
    /// The directories that it is merged from, top first.
    pub(crate) parts: Vec<LayerPath>,
    /// Its path in the view of the lower section, if it shows through from there.
    pub(crate) origin: Option<PathBuf>,
}

/// The object that a lookup found.
pub(crate) struct Merged {
    /// Its place. Only a directory has more than one part.
    pub(crate) at: MergedDir,
    /// The status of the topmost part.
    pub(crate) stat: Statx,
    /// The inode number of the lowest part.
    pub(crate) lowest_ino: u64,
    /// The object below that has the content, if this one is a metacopy.
    pub(crate) content: Option<Box<Merged>>,
}

impl Merged {
    fn new(parts: Vec<LayerPath>, stat: Statx) -> Self {
        let at = MergedDir { parts, origin: None };
        Self { at, lowest_ino: stat.stx_ino, stat, content: None }
    }

    pub(crate) fn kind(&self) -> FileType {
        FileType::from_raw_mode(u32::from(self.stat.stx_mode))
    }

    pub(crate) fn is_directory(&self) -> bool {
        self.kind() == FileType::Directory
    }
}

/// Layers, top first.
#[derive(Debug)]
pub(crate) struct LayerStack {
    layers: Vec<Arc<Layer>>,
    /// The number of layers in the upper section.
    own: usize,
    /// Finds the content of metacopies, which only layers have that overlayfs wrote.
    follows_metacopies: bool,
}

impl Deref for LayerStack {
    type Target = [Arc<Layer>];

    fn deref(&self) -> &Self::Target {
        &self.layers
    }
}

impl LayerStack {
    /// The stack of a view, whose layers are all in one section. They have no metacopies.
    pub(crate) fn new(layers: Vec<Arc<Layer>>) -> Self {
        Self { own: layers.len(), layers, follows_metacopies: false }
    }

    /// A branch's own layers over those of its parent.
    pub(crate) fn over(own: &[Arc<Layer>], below: &[Arc<Layer>]) -> Self {
        Self { layers: [own, below].concat(), own: own.len(), follows_metacopies: true }
    }

    /// The merged root directory of the whole stack.
    pub(crate) fn root(&self) -> MergedDir {
        self.root_from(0)
    }

    /// The root directory as the layers from this position on show it.
    fn root_from(&self, first: usize) -> MergedDir {
        let existing = self[first..].iter().filter(|layer| layer.is_created());
        let part = |layer: &Arc<Layer>| LayerPath { layer: layer.clone(), path: PathBuf::new() };
        let origin = (self.own < self.len()).then(PathBuf::new);
        MergedDir { parts: existing.map(part).collect(), origin }
    }

    /// Whether a layer is in the upper section.
    pub(crate) fn is_own(&self, layer: &Layer) -> bool {
        self[..self.own].iter().any(|own| own.id == layer.id)
    }

    /// Looks up `path` from the root.
    pub(crate) fn resolve(&self, path: &Path) -> Result<Option<Merged>> {
        self.resolve_from(0, path)
    }

    /// Looks up `path` in the layers from this position on.
    fn resolve_from(&self, first: usize, path: &Path) -> Result<Option<Merged>> {
        let mut directory = self.root_from(first);
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            let top = directory.parts.first().ok_or(Errno::NOENT)?;
            let stat = top.layer.tree.stat(&top.path)?;
            return Ok(Some(Merged { at: directory, ..Merged::new(Vec::new(), stat) }));
        };
        for name in parent {
            match self.find(&directory.parts, directory.origin.as_deref(), name)? {
                Some(found) if found.is_directory() => directory = found.at,
                _ => return Ok(None),
            }
        }
        self.find(&directory.parts, directory.origin.as_deref(), name)
    }

    /// Looks up `name` in the directory that is merged from `parts`; `origin` as in [`MergedDir`].
    ///
    /// # Errors
    /// `EUCLEAN` for an invalid redirect, and for a metacopy without content.
    pub(crate) fn find(
        &self,
        parts: &[LayerPath],
        origin: Option<&Path>,
        name: &OsStr,
    ) -> Result<Option<Merged>> {
        let mut found: Option<Merged> = None;
        let mut redirected = None;
        for (position, part) in parts.iter().enumerate() {
            let (layer, path) = (&part.layer, part.path.join(name));
            if layer.is_base() && is_hidden(&path) {
                continue;
            }
            let stat = match layer.tree.stat_entry(&part.path, name) {
                Ok(stat) => stat,
                Err(Errno::NOENT | Errno::NOTDIR) => continue,
                Err(error) => return Err(error),
            };
            if layer.is_whiteout(&path, &stat)? {
                break;
            }
            let is_directory = FileType::from_raw_mode(stat.stx_mode.into()) == FileType::Directory;
            if found.is_some() && !is_directory {
                break; // hidden by the directories above it
            }
            let at = LayerPath { layer: Arc::clone(layer), path };
            let is_lowest = layer.is_base() || self.last().is_some_and(|last| last.id == layer.id);
            let made = match &mut found {
                Some(made) => {
                    made.lowest_ino = stat.stx_ino;
                    made.at.parts.push(at);
                    made
                }
                None => found.insert(Merged::new(vec![at], stat)),
            };
            let path = &made.at.parts[made.at.parts.len() - 1].path;
            let rest = &parts[position + 1..];
            if !is_directory {
                if self.follows_metacopies && layer.is_without_content(path)? {
                    let to = layer.redirect(path)?.unwrap_or(Redirect::Sibling(name.to_owned()));
                    let below = self.redirected(layer, rest, origin, &to)?;
                    let below = below.filter(|below| !below.is_directory());
                    let mut below = Box::new(below.ok_or(Errno::UCLEAN)?);
                    made.content = Some(below.content.take().unwrap_or(below));
                }
                break;
            }
            match if is_lowest { Below::Nothing } else { layer.below(path)? } {
                Below::SameName => {}
                Below::Nothing => break,
                Below::Redirected(to) => {
                    let below = self.redirected(layer, rest, origin, &to)?;
                    if let Some(below) = below.filter(Merged::is_directory) {
                        made.lowest_ino = below.lowest_ino;
                        made.at.parts.extend(below.at.parts);
                        redirected = below.at.origin.filter(|_| self.is_own(layer));
                    }
                    break;
                }
            }
        }
        if let (Some(made), Some(origin)) = (&mut found, origin) {
            let shows_through = made.at.parts.last().is_some_and(|last| !self.is_own(&last.layer));
            made.at.origin = shows_through.then(|| redirected.unwrap_or_else(|| origin.join(name)));
        }
        Ok(found)
    }

    /// Records a read of a path of the snapshot, if the policy needs it.
    pub(crate) fn record_read(&self, path: &Path, read: Read) -> Result<()> {
        self[0].record_read(path, read)
    }

    /// Records the precondition of a path of the base when the branch first depends on it.
    pub(crate) fn record(&self, layer: &Layer, path: &Path, expected: Precondition) -> Result<()> {
        if layer.is_base() && !self[0].is_base() {
            self[0].record_precondition(path, expected)
        } else {
            Ok(())
        }
    }

    /// Follows a redirect of `layer`. `rest` are the directories below the one that has the redirect.
    fn redirected(
        &self,
        layer: &Layer,
        rest: &[LayerPath],
        origin: Option<&Path>,
        redirect: &Redirect,
    ) -> Result<Option<Merged>> {
        match redirect {
            Redirect::Sibling(name) => self.find(rest, origin, name),
            Redirect::Path(path) => {
                let position = self.iter().position(|other| other.id == layer.id);
                self.resolve_from(position.ok_or(Errno::IO)? + 1, path)
            }
        }
    }
}
