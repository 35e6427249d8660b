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
    pieces: Vec<LayerDir>,
    /// The directory of the view below that shows through.
    pub(super) below: Option<Box<Self>>,
}

impl Directory {
    /// Nothing of it is in the stack's own layers.
    pub(super) fn is_untouched(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Where it is in the view below, if it is there.
    pub(super) fn origin(&self) -> Option<&Path> {
        self.below.as_deref().map(|below| below.path.as_path())
    }
}

/// What a name means.
pub(super) enum Found {
    Directory(Directory),
    /// An object of the stack's own layers.
    Own(Side),
    /// An object of the view below, with its path there.
    Through(Side),
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
            pieces: (first..self.layers.len())
                .filter(|layer| self.layers[*layer].is_made())
                .map(piece)
                .collect(),
            below: self.below.map(|below| Box::new(below.root())),
        }
    }

    /// What `directory` has under `name`.
    pub(super) fn find(&self, directory: &Directory, name: &OsStr) -> Result<Option<Found>, Error> {
        let path = directory.path.join(name);
        let mut pieces: Vec<LayerDir> = Vec::new();
        let made = |pieces: Vec<LayerDir>, below| {
            let directory = Directory { path: path.clone(), pieces, below };
            Ok((!directory.pieces.is_empty()).then_some(Found::Directory(directory)))
        };
        for (position, piece) in directory.pieces.iter().enumerate() {
            let layer = &self.layers[piece.layer];
            let place = piece.path.join(name);
            if directory.path.as_os_str().is_empty() && is_hidden(&path) {
                return Ok(None);
            }
            let Some(stat) = stat(layer, &place)? else { continue };
            if layer.is_whiteout(&place, &stat).at(&place)? {
                return made(pieces, None);
            }
            if FileType::from_raw_mode(u32::from(stat.stx_mode)) != FileType::Directory {
                if pieces.is_empty() {
                    let content = self.content(directory, position, name, &place)?;
                    let (layer, stat) = (Arc::clone(layer), Stat::from(&stat));
                    return Ok(Some(Found::Own(Side {
                        path,
                        layer,
                        place,
                        stat,
                        content,
                        partial: None,
                    })));
                }
                return made(pieces, None);
            }
            pieces.push(LayerDir { layer: piece.layer, path: place.clone() });
            if layer.is_opaque(&place).at(&place)? {
                return made(pieces, None);
            }
            if let Some(redirect) = layer.redirect_text(&place).at(&place)? {
                let below = match self.redirected(directory, position, &place, &redirect)? {
                    Some(Found::Directory(rest)) => {
                        pieces.extend(rest.pieces);
                        rest.below
                    }
                    _ => None,
                };
                return made(pieces, below);
            }
        }
        let through = match (self.below, &directory.below) {
            (Some(view), Some(below)) => view.find(below, name)?,
            _ => None,
        };
        match through {
            Some(Found::Directory(below)) => {
                let below = Some(Box::new(below));
                Ok(Some(Found::Directory(Directory { path, pieces, below })))
            }
            Some(Found::Own(object) | Found::Through(object)) if pieces.is_empty() => {
                Ok(Some(Found::Through(object)))
            }
            _ => made(pieces, None),
        }
    }

    /// What a redirect names in what lies below the layer at `position` in `directory`. One with a leading slash is a path
    /// from the root; one without, which the kernel writes, a name in the same directory.
    fn redirected(
        &self,
        directory: &Directory,
        position: usize,
        place: &Path,
        redirect: &[u8],
    ) -> Result<Option<Found>, Error> {
        if redirect.first() != Some(&b'/') {
            let rest = Directory {
                path: directory.path.clone(),
                pieces: directory.pieces[position + 1..].to_vec(),
                below: directory.below.clone(),
            };
            return self.find(&rest, OsStr::from_bytes(redirect));
        }
        let path = parse_redirect(redirect, place).ok_or_else(|| {
            Error::Corrupt(format!("{} has a redirect that leads out", place.display()))
        })?;
        let mut directory = self.root_from(directory.pieces[position].layer + 1);
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(None) };
        for name in parent {
            match self.find(&directory, name)? {
                Some(Found::Directory(found)) => directory = found,
                _ => return Ok(None),
            }
        }
        self.find(&directory, name)
    }

    /// Who has the content of a file of which the layer at `position` has the attributes alone.
    fn content(
        &self,
        directory: &Directory,
        position: usize,
        name: &OsStr,
        place: &Path,
    ) -> Result<Option<Box<Side>>, Error> {
        let layer = &self.layers[directory.pieces[position].layer];
        if !layer.is_without_content(place).at(place)? {
            return Ok(None);
        }
        let redirect = layer.redirect_text(place).at(place)?;
        let redirect = redirect.as_deref().unwrap_or(name.as_bytes());
        match self.redirected(directory, position, place, redirect)? {
            Some(Found::Own(mut side) | Found::Through(mut side)) => {
                Ok(Some(side.content.take().unwrap_or_else(|| Box::new(side))))
            }
            _ => Err(Error::Corrupt(format!("the content of {} is gone", place.display()))),
        }
    }

    /// The directory itself: its topmost part has the attributes that it shows.
    pub(super) fn side(&self, directory: &Directory) -> Result<Side, Error> {
        let Some(piece) = directory.pieces.first() else {
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
        for piece in &directory.pieces {
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

/// What the view of `layers` has at a path.
pub fn find_below(layers: &[Arc<Layer>], path: &Path) -> Result<Option<Side>, Error> {
    let view = Stack::new(layers, None);
    let mut directory = view.root();
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return view.side(&directory).map(Some);
    };
    for name in parent {
        match view.find(&directory, name)? {
            Some(Found::Directory(found)) => directory = found,
            _ => return Ok(None),
        }
    }
    match view.find(&directory, name)? {
        Some(Found::Directory(found)) => view.side(&found).map(Some),
        Some(Found::Own(side) | Found::Through(side)) => Ok(Some(side)),
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
