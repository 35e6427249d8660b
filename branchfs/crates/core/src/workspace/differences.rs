//! Comparing a branch with its parent as it was at the fork.

use std::path::Path;
use std::sync::Arc;

use super::{BranchRef, Workspace};
use crate::diff::{Pair, RenamedDirs, list_view, walk};
use crate::error::{Context, Error};
use crate::layer::Layer;

impl Workspace {
    /// Pairs the objects in a branch's own layers with those below. The branch is frozen meanwhile. The caller reads
    /// the content later, when it may have changed.
    ///
    /// # Errors
    /// `Usage` for main, `NotFound`, `Io`.
    pub fn compare(&self, selector: &BranchRef, moves: RenamedDirs) -> Result<Vec<Pair>, Error> {
        pairs(self, selector, |own, below| Ok(walk(own, below, moves)?.pairs))
    }

    /// Pairs everything that a branch shows with nothing, for an archive of its whole view.
    ///
    /// # Errors
    /// As [`Self::compare`].
    pub fn view_of(&self, selector: &BranchRef) -> Result<Vec<Pair>, Error> {
        pairs(self, selector, |own, below| list_view(&[own, below].concat()))
    }
}

/// `list` gets the branch's own layers, and those below them.
fn pairs(
    workspace: &Workspace,
    selector: &BranchRef,
    list: impl Fn(&[Arc<Layer>], &[Arc<Layer>]) -> Result<Vec<Pair>, Error>,
) -> Result<Vec<Pair>, Error> {
    let held = workspace
        .table
        .hold(selector, |_, _| Ok(()))?
        .ok_or_else(|| Error::Usage("main has no parent to compare with".to_owned()))?;
    let branch = &held.branch;
    workspace.driver.current().convert(branch.record.id)?;
    let mounted = workspace.table.mounted(branch)?;
    // Not while a transaction changes the base.
    let pass = workspace.table.mount.enter_request();
    let mut view = mounted.lock();
    drop(pass);
    view.tree.link_all_copied_up().at(&workspace.store.base_path)?;
    let (own, below) = branch.stack.split_at(branch.record.layers.len());
    for layer in own {
        layer.tree.invalidate(Path::new("")); // where the kernel writes a layer by itself, directories move unseen
    }
    let mut pairs = list(own, below)?;
    for side in pairs.iter_mut().flat_map(|pair| [&mut pair.before, &mut pair.after]).flatten() {
        side.partial =
            view.tree.layers.partial_of_layer(&side.layer, &side.place, side.stat.ino)?;
    }
    drop(view);
    Ok(pairs)
}
