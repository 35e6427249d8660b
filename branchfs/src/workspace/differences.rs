//! Comparing a branch with its parent as it was at the fork.

use super::{Selector, Workspace};
use crate::difference::{Moves, Pair, walk};
use crate::error::{Context, Error};

impl Workspace {
    /// Pairs what a branch's own layers have with what lies below them. The branch stands still meanwhile; content is
    /// for the caller to read, and may by then be another.
    ///
    /// # Errors
    /// `Usage` for main, `NotFound`, `Io`.
    pub(crate) fn compare(&self, selector: &Selector, moves: Moves) -> Result<Vec<Pair>, Error> {
        let held = self
            .hold(selector, |_, _| Ok(()))?
            .ok_or_else(|| Error::Usage("main has no parent to compare with".to_owned()))?;
        let branch = &held.branch;
        self.driver().settle(branch.record.id)?;
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        // Not while a transaction changes the base.
        let pass = self.filesystem.pass();
        let mut view = mounted.lock();
        drop(pass);
        view.join_all_links().at(&self.base_path)?;
        let (own, below) = branch.stack.split_at(branch.record.layers.len());
        for layer in own {
            layer.tree.forget_all(); // where the kernel writes a layer by itself, directories move unseen
        }
        let mut pairs = walk(own, below, moves)?.pairs;
        for side in pairs.iter_mut().flat_map(|pair| [&mut pair.before, &mut pair.after]).flatten()
        {
            side.partial = view.partial_of_layer(&side.layer, &side.place, side.stat.ino)?;
        }
        drop(view);
        Ok(pairs)
    }
}
