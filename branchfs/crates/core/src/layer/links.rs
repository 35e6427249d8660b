//! Hard links: which copies a layer has of objects with several names below, how many links are shown, and which are hidden.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use rustix::fs::AtFlags;

use super::{Layer, LayerId};
use crate::rooted_dir::{Result, RootedDir};

/// The hard links of one layer.
///
/// Each change of a count is logged in the layer's write set before it is shown.
#[derive(Clone, Copy)]
pub(crate) struct HardLinks<'l>(&'l Layer);

impl Layer {
    pub(crate) fn hard_links(&self) -> HardLinks<'_> {
        HardLinks(self)
    }
}

impl<'l> HardLinks<'l> {
    /// Number of links to show for an object of this layer that has `links` names in it.
    pub(crate) fn shown(self, ino: u64, links: u32) -> u32 {
        let shown = self.0.own.as_ref().and_then(|own| own.log().link_counts.get(&ino).copied());
        shown.unwrap_or(links)
    }

    /// Fixes the link count that an object shows.
    pub(crate) fn set_count(self, ino: u64, links: u32) -> Result<()> {
        let mut log = self.0.own().log();
        log.writes.links(ino, links)?;
        log.link_counts.insert(ino, links);
        Ok(())
    }

    /// Changes the link count of an object whose links are counted.
    pub(crate) fn change_count(self, ino: u64, change: i32) -> Result<()> {
        let Some(own) = &self.0.own else { return Ok(()) };
        let mut log = own.log();
        let Some(count) = log.link_counts.get(&ino) else { return Ok(()) };
        let count = count.saturating_add_signed(change);
        log.writes.links(ino, count)?;
        log.link_counts.insert(ino, count);
        Ok(())
    }

    /// Records the copy at `path`, inode `ino`, of an object that had `links` names in a lower layer.
    pub(crate) fn keep_copy(
        self,
        origin: (LayerId, u64),
        path: &Path,
        ino: u64,
        links: u32,
    ) -> Result<()> {
        let own = self.0.own();
        let from = self.0.tree.directory(path.parent().unwrap_or(Path::new("")))?;
        let to = own.state().links.tree()?.directory(Path::new(""))?;
        let name = path.file_name().unwrap_or(OsStr::new("."));
        rustix::fs::linkat(&*from, name, &*to, OsStr::new(&link_name(origin)), AtFlags::empty())?;
        let mut log = own.log();
        log.linked.insert(origin);
        log.link_counts.insert(ino, links);
        log.writes.links(ino, links)
    }

    /// Changes the number of names of a lower object that this layer hides.
    pub(crate) fn hide(self, (layer, ino): (LayerId, u64), change: i32) -> Result<()> {
        let mut log = self.0.own().log();
        let count = log.hidden.get(&(layer.0, ino)).copied().unwrap_or(0);
        let count = count.saturating_add_signed(change);
        log.writes.hidden((layer.0, ino), count)?;
        log.hidden.insert((layer.0, ino), count);
        Ok(())
    }

    /// The number of names of a lower object that this layer hides.
    pub(crate) fn hidden(self, (layer, ino): (LayerId, u64)) -> u32 {
        let hidden =
            self.0.own.as_ref().and_then(|own| own.log().hidden.get(&(layer.0, ino)).copied());
        hidden.unwrap_or(0)
    }

    /// Whether this layer has a copy of a lower object that had several names.
    pub(crate) fn has_copy(self, origin: (LayerId, u64)) -> bool {
        self.0.own.as_ref().is_some_and(|own| own.log().linked.contains(&origin))
    }

    /// Adds a name to the copy of an object with several names below.
    pub(crate) fn link_copy(self, origin: (LayerId, u64), path: &Path) -> Result<()> {
        let from = self.0.own().state().links.tree()?.directory(Path::new(""))?;
        let to = self.0.tree.directory(path.parent().unwrap_or(Path::new("")))?;
        let name = path.file_name().unwrap_or(OsStr::new("."));
        rustix::fs::linkat(&*from, OsStr::new(&link_name(origin)), &*to, name, AtFlags::empty())
    }

    /// The path of such a copy, for copying it up into another layer.
    pub(crate) fn copy_path(self, origin: (LayerId, u64)) -> Result<(&'l RootedDir, PathBuf)> {
        Ok((self.0.own().state().links.tree()?, PathBuf::from(link_name(origin))))
    }

    /// Whether some of the names below are not links to the copy yet.
    pub(crate) fn lacks_names(self) -> Result<bool> {
        let Some(own) = &self.0.own else { return Ok(false) };
        for entry in own.state().links.list()? {
            let stat = own.state().links.tree()?.stat(Path::new(&entry.name))?;
            // One of its links is the one in `links`.
            if self.shown(stat.stx_ino, stat.stx_nlink) > stat.stx_nlink - 1 {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

fn link_name((layer, ino): (LayerId, u64)) -> String {
    format!("{}-{ino}", layer.0)
}

pub(super) fn parse_link(name: &OsStr) -> Option<(LayerId, u64)> {
    let (layer, ino) = name.to_str()?.split_once('-')?;
    Some((LayerId(layer.parse().ok()?), ino.parse().ok()?))
}
