//! Merged lookups in two stacked views, remembering where one shows through the other.
//!
//! A branch's own layers lie on its parent's view. [`Stack::find`] follows whiteouts, opaque directories and redirects as
//! a view does, and keeps apart what the own layers have and which directory of the parent shows through: that is what
//! tells a change from what was there, and a renamed directory from a new one.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FileType, Statx};
use rustix::io::Errno;

use super::{Side, Stat};
use crate::error::{Context, Error};
use crate::layer::Layer;
use crate::overlay::parse_redirect;
use crate::view::is_hidden;

/// Layers, top first, over another stack.
#[derive(Clone, Copy)]
pub(super) struct Stack<'s> {
    layers: &'s [Arc<Layer>],
    below: Option<&'s Self>,
}

/// A directory in one layer of a stack.
#[derive(Clone, Debug)]
struct LayerDir {
    /// Position in the stack.
    layer: usize,
    path: PathBuf,
}

/// A directory of a view.
#[derive(Clone, Debug)]
pub(super) struct Directory {
    /// In the view.
    pub(super) path: PathBuf,
    layer_dirs: Vec<LayerDir>,
    /// The directory of the view below that it merges with.
    pub(super) below: Option<Box<Self>>,
}

impl Directory {
    /// Whether the stack's own layers have nothing of it.
    pub(super) fn is_untouched(&self) -> bool {
        self.layer_dirs.is_empty()
    }

    /// Its path in the view below, if it exists there.
    pub(super) fn origin(&self) -> Option<&Path> {
        self.below.as_deref().map(|below| below.path.as_path())
    }
}

/// The result of a lookup.
pub(super) enum Entry {
    Directory(Directory),
    /// An object of the stack's own layers.
    Upper(Side),
    /// An object of the view below, with its path there.
    Lower(Side),
}

impl<'s> Stack<'s> {
    pub(super) fn new(layers: &'s [Arc<Layer>], below: Option<&'s Self>) -> Self {
        Self { layers, below }
    }

    pub(super) fn root(&self) -> Directory {
        self.root_from(0)
    }

    fn root_from(&self, first: usize) -> Directory {
        let piece = |layer| LayerDir { layer, path: PathBuf::new() };
        Directory {
            path: PathBuf::new(),
            layer_dirs: (first..self.layers.len())
                .filter(|layer| self.layers[*layer].is_created())
                .map(piece)
                .collect(),
            below: self.below.map(|below| Box::new(below.root())),
        }
    }

    /// Looks up `name` in `directory`.
    pub(super) fn find(&self, directory: &Directory, name: &OsStr) -> Result<Option<Entry>, Error> {
        let path = directory.path.join(name);
        let mut layer_dirs: Vec<LayerDir> = Vec::new();
        let made = |layer_dirs: Vec<LayerDir>, below| {
            let directory = Directory { path: path.clone(), layer_dirs, below };
            Ok((!directory.layer_dirs.is_empty()).then_some(Entry::Directory(directory)))
        };
        for (position, piece) in directory.layer_dirs.iter().enumerate() {
            let layer = &self.layers[piece.layer];
            let place = piece.path.join(name);
            if directory.path.as_os_str().is_empty() && is_hidden(&path) {
                return Ok(None);
            }
            let Some(stat) = stat(layer, &place)? else { continue };
            if layer.is_whiteout(&place, &stat).at(&place)? {
                return made(layer_dirs, None);
            }
            if FileType::from_raw_mode(u32::from(stat.stx_mode)) != FileType::Directory {
                if layer_dirs.is_empty() {
                    let content = self.content(directory, position, name, &place)?;
                    let (layer, stat) = (Arc::clone(layer), Stat::from(&stat));
                    return Ok(Some(Entry::Upper(Side {
                        path,
                        layer,
                        place,
                        stat,
                        content,
                        partial: None,
                    })));
                }
                return made(layer_dirs, None);
            }
            layer_dirs.push(LayerDir { layer: piece.layer, path: place.clone() });
            if layer.is_opaque(&place).at(&place)? {
                return made(layer_dirs, None);
            }
            if let Some(redirect) = layer.redirect_text(&place).at(&place)? {
                let below = match self.redirected(directory, position, &place, &redirect)? {
                    Some(Entry::Directory(rest)) => {
                        layer_dirs.extend(rest.layer_dirs);
                        rest.below
                    }
                    _ => None,
                };
                return made(layer_dirs, below);
            }
        }
        let through = match (self.below, &directory.below) {
            (Some(view), Some(below)) => view.find(below, name)?,
            _ => None,
        };
        match through {
            Some(Entry::Directory(below)) => {
                let below = Some(Box::new(below));
                Ok(Some(Entry::Directory(Directory { path, layer_dirs, below })))
            }
            Some(Entry::Upper(object) | Entry::Lower(object)) if layer_dirs.is_empty() => {
                Ok(Some(Entry::Lower(object)))
            }
            _ => made(layer_dirs, None),
        }
    }

    /// The directory below the layer at `position` that a redirect names. A redirect with a leading slash is a path
    /// from the root. One without, which the kernel writes, is a name in the same directory.
    fn redirected(
        &self,
        directory: &Directory,
        position: usize,
        place: &Path,
        redirect: &[u8],
    ) -> Result<Option<Entry>, Error> {
        if redirect.first() != Some(&b'/') {
            let rest = Directory {
                path: directory.path.clone(),
                layer_dirs: directory.layer_dirs[position + 1..].to_vec(),
                below: directory.below.clone(),
            };
            return self.find(&rest, OsStr::from_bytes(redirect));
        }
        let path = parse_redirect(redirect, place).ok_or_else(|| {
            Error::Corrupt(format!("{} has a redirect that leads out", place.display()))
        })?;
        let mut directory = self.root_from(directory.layer_dirs[position].layer + 1);
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(None) };
        for name in parent {
            match self.find(&directory, name)? {
                Some(Entry::Directory(found)) => directory = found,
                _ => return Ok(None),
            }
        }
        self.find(&directory, name)
    }

    /// Finds the object with the content of a metacopy in the layer at `position`.
    fn content(
        &self,
        directory: &Directory,
        position: usize,
        name: &OsStr,
        place: &Path,
    ) -> Result<Option<Box<Side>>, Error> {
        let layer = &self.layers[directory.layer_dirs[position].layer];
        if !layer.is_without_content(place).at(place)? {
            return Ok(None);
        }
        let redirect = layer.redirect_text(place).at(place)?;
        let redirect = redirect.as_deref().unwrap_or(name.as_bytes());
        match self.redirected(directory, position, place, redirect)? {
            Some(Entry::Upper(mut side) | Entry::Lower(mut side)) => {
                Ok(Some(side.content.take().unwrap_or_else(|| Box::new(side))))
            }
            _ => Err(Error::Corrupt(format!("the content of {} is gone", place.display()))),
        }
    }

    /// The directory itself, with the attributes of its topmost layer.
    pub(super) fn side(&self, directory: &Directory) -> Result<Side, Error> {
        let Some(piece) = directory.layer_dirs.first() else {
            return match (self.below, &directory.below) {
                (Some(view), Some(below)) => {
                    Ok(Side { path: directory.path.clone(), ..view.side(below)? })
                }
                _ => Err(Errno::NOENT).at(&directory.path),
            };
        };
        let layer = Arc::clone(&self.layers[piece.layer]);
        let stat = Stat::from(&layer.tree.stat(&piece.path).at(&directory.path)?);
        let (path, place) = (directory.path.clone(), piece.path.clone());
        Ok(Side { path, layer, place, stat, content: None, partial: None })
    }

    /// Names that the stack's own layers have in a directory, whiteouts among them.
    pub(super) fn own_names(&self, directory: &Directory) -> Result<BTreeSet<OsString>, Error> {
        let mut names = BTreeSet::new();
        for piece in &directory.layer_dirs {
            let listed = self.layers[piece.layer].tree.list(&piece.path).at(&directory.path)?;
            names.extend(listed.into_iter().map(|entry| entry.name));
        }
        Ok(names)
    }

    /// Names that a directory may have: each is to be looked up.
    pub(super) fn all_names(&self, directory: &Directory) -> Result<BTreeSet<OsString>, Error> {
        let mut names = self.own_names(directory)?;
        if let (Some(view), Some(below)) = (self.below, &directory.below) {
            names.extend(view.all_names(below)?);
        }
        Ok(names)
    }
}

/// Looks up a path in the view of `layers`.
pub fn find_below(layers: &[Arc<Layer>], path: &Path) -> Result<Option<Side>, Error> {
    let view = Stack::new(layers, None);
    let mut directory = view.root();
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return view.side(&directory).map(Some);
    };
    for name in parent {
        match view.find(&directory, name)? {
            Some(Entry::Directory(found)) => directory = found,
            _ => return Ok(None),
        }
    }
    match view.find(&directory, name)? {
        Some(Entry::Directory(found)) => view.side(&found).map(Some),
        Some(Entry::Upper(side) | Entry::Lower(side)) => Ok(Some(side)),
        None => Ok(None),
    }
}

fn stat(layer: &Layer, place: &Path) -> Result<Option<Statx>, Error> {
    match layer.tree.stat(place) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
        Err(error) => Err(error).at(place),
    }
}
