//! What a sync makes durable: the branch records that are not synced yet, too.

use std::fs::File;
use std::sync::{Arc, PoisonError};

use super::{MAIN, Mount, ViewId};
use crate::rooted_dir::Result;

impl Mount {
    /// Records that a new branch's record was written, but not synced.
    pub(crate) fn set_unsynced_record(&self, slot: ViewId, record: Arc<File>) {
        if let Ok(mounted) = self.mounted(slot) {
            *mounted.unsynced_record.lock().unwrap_or_else(PoisonError::into_inner) = Some(record);
        }
    }

    /// Before the first sync in a branch: makes the records of the branch and its ancestors durable.
    ///
    /// # Errors
    /// `ESTALE` if a branch is gone; the error of the sync.
    pub fn sync_records(&self, mut slot: ViewId) -> Result<()> {
        while slot != MAIN {
            let mounted = self.mounted(slot)?;
            let mut record = mounted.unsynced_record.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(file) = record.as_ref() {
                rustix::fs::fdatasync(&**file)?;
                *record = None;
            }
            drop(record);
            slot = mounted.parent;
        }
        Ok(())
    }
}
