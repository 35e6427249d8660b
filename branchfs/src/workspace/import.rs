//! A branch made from an archive.

use std::fs::File;
use std::io::{self, Seek};
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use super::{BranchInfo, Selector, Workspace};
use crate::archive::{self, Rights};
use crate::error::{Context, Error};

impl Workspace {
    /// Creates a branch that is what the archive `content` says. All of it or nothing.
    ///
    /// The archive is read to its end first, into a file without a name in the store: whoever sends it slowly holds
    /// nobody up.
    ///
    /// # Errors
    /// As [`Self::create`]; `Usage` for an archive that is damaged or more than `rights` allow.
    pub(crate) fn import(
        &self,
        name: &str,
        parent: &Selector,
        mut content: File,
        rights: &Rights<'_>,
    ) -> Result<BranchInfo, Error> {
        let store = self.store();
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        let spool = rustix::fs::open(store, flags, Mode::RUSR | Mode::WUSR).at(store)?;
        let mut spool = File::from(spool);
        io::copy(&mut content, &mut spool).at(Path::new("the archive"))?;
        spool.rewind().at(store)?;
        let read = io::BufReader::with_capacity(1 << 20, spool);
        self.create_filled(
            name,
            parent,
            None,
            Some(Box::new(|layer, below| archive::import(read, layer, below, rights))),
        )
    }
}
