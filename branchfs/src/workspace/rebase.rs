//! Rebase: a branch is forked anew from its parent as it is now, with its changes on top.
//!
//! Nothing is copied: the branch keeps its layers, and its record gets a new fork time and the layers that its parent has
//! now. That shows the same changes because no path that the branch changed was changed in the parent since the fork, or
//! because the caller forces the branch's version. What the branch noted of the base is then replaced by what the base is
//! now, so that a later commit compares with the new fork. The record is durable first: a crash in between leaves the
//! older notes, which at worst report a conflict that is none.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;

use super::commit_into_branch::Work;
use super::commits::has_no_live_children;
use super::conflicts::Theirs;
use super::records::Line;
use super::{Branch, MAIN_BRANCH, Policy, Selector, Workspace, now};
use crate::commit::{self, Disk, Metadata};
use crate::driver::Completion;
use crate::error::{Context, Error};
use crate::filesystem::MAIN;
use crate::layer::{Layer, identity};
use crate::seen::{Expected, Identity};

/// What becomes of paths that the branch and others changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Resolution {
    /// The branch is not rebased.
    Refuse,
    /// The branch's version of them stays, and can be committed.
    Override,
    /// The branch's version of them stays, and a commit of it finds the conflict again.
    Leave,
}

impl Workspace {
    /// Forks a branch anew from its parent's present state and keeps its changes, whether it is stale or live. Returns the
    /// conflicting paths. `dry_run` finds them and changes nothing.
    ///
    /// # Errors
    /// `Conflict` lists the paths that the branch and others changed, where these are refused; `Frozen`, `Busy`, `Stale` (the
    /// parent), `Stopped`, `Io`. The branch is as before then. `Incomplete`: it was rebased, and transactions are stopped.
    pub(crate) fn rebase(
        &self,
        selector: &Selector,
        resolution: Resolution,
        dry_run: bool,
    ) -> Result<BTreeSet<PathBuf>, Error> {
        let _frozen = self.await_writers(selector)?;
        let _turn = self.begin_transaction()?;
        let held = self
            .hold(selector, has_no_live_children)?
            .ok_or_else(|| Error::Usage("main has no parent to be rebased onto".to_owned()))?;
        let branch = &held.branch;
        let parent = match branch.record.parent {
            MAIN_BRANCH => None,
            _ => Some(self.parent_of(branch)?),
        };
        if let Some(stale) = parent.as_ref().filter(|parent| parent.record.is_stale) {
            return Err(Error::Stale(stale.record.name.clone()));
        }
        let rebased = self.prepare_rebase(branch).and_then(|()| {
            let obstacles = self.find_obstacles(branch, parent.as_ref())?;
            if !obstacles.conflicts.is_empty() && resolution == Resolution::Refuse {
                return Err(conflict(&branch.record.name, obstacles.conflicts));
            }
            if !dry_run {
                obstacles.merge_attributes(branch)?;
                let is_left = resolution == Resolution::Leave;
                let left = if is_left { obstacles.conflicts.clone() } else { BTreeSet::new() };
                self.move_onto(branch, parent.as_ref(), &left)?;
            }
            Ok(obstacles.conflicts)
        });
        drop(held);
        self.thaw_presented(&self.lock());
        self.empty_trash();
        rebased
    }

    /// Brings the layers into a form that can be read: of a stale branch once and for all, as no process can write there
    /// any more.
    fn prepare_rebase(&self, branch: &Branch) -> Result<(), Error> {
        if !branch.record.is_stale {
            self.refuse_writers(branch)?;
            self.driver().freeze(branch.record.id, Completion::Whole)?;
        } else if self.is_by_kernel(branch)? {
            self.leave_to_fuse(branch)?;
        }
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        mounted.lock().make_layer().at(&self.base_path)
    }

    /// What stands between a branch and its parent's present state.
    fn find_obstacles(&self, branch: &Branch, parent: Option<&Branch>) -> Result<Obstacles, Error> {
        let (theirs, conflicts, merged) = match parent {
            None => {
                let (theirs, attributes) = self.theirs_of_main(branch)?;
                let _staged = self.stage(branch.record.id, &branch.record)?;
                let plan = self.plan_against(branch, self.traces_since(branch)?, attributes)?;
                let written = theirs.against(&plan.changes, &plan.written);
                let merged = plan.merged_attributes();
                let merged = merged.map(|(path, new)| (path.to_path_buf(), new.clone())).collect();
                (theirs, written.union(&plan.drift).cloned().collect(), merged)
            }
            Some(parent) => {
                let (ours, theirs) = (Work::of(branch)?, Work::since(parent, branch)?.theirs());
                let written = ours.against(&theirs);
                (theirs, written, Vec::new())
            }
        };
        let mut obstacles = Obstacles { conflicts, merged };
        if self.settings.policy == Policy::Serializable {
            obstacles.conflicts.extend(theirs.against_reads(&self.reads(&branch.record)?));
        }
        Ok(obstacles)
    }

    /// What others committed to main since the branch was forked, and the attributes that objects had before: as its
    /// snapshot layers tell, and, once it is stale, the history. Commits that the history has dropped are found by what
    /// they left in the base.
    fn theirs_of_main(
        &self,
        branch: &Branch,
    ) -> Result<(Theirs, BTreeMap<PathBuf, Metadata>), Error> {
        let record = &branch.record;
        let (mut theirs, mut attributes) = (self.theirs(record)?, BTreeMap::new());
        if !record.is_stale {
            return Ok((theirs, attributes));
        }
        for past in commit::history(&self.disk()?)? {
            let header = &past.commit.header;
            let is_later = header.stale.contains(&record.id)
                || header.decided.max(past.done.0) > record.created;
            // A part of this branch.
            let is_own = header.kind == commit::Kind::Commit { branch: record.id };
            if is_own || !is_later || past.undone.is_some() {
                continue;
            }
            theirs.add(&past.commit.changes);
            for step in &past.commit.steps {
                if let Some((path, old)) = step.attributes_before() {
                    attributes.entry(path.to_path_buf()).or_insert_with(|| old.clone());
                }
            }
        }
        Ok((theirs, attributes))
    }

    /// Moves a branch on top of its parent as it is now, and shows it there. The conflicts that are `left` stay conflicts.
    fn move_onto(
        &self,
        branch: &Branch,
        parent: Option<&Branch>,
        left: &BTreeSet<PathBuf>,
    ) -> Result<(), Error> {
        let parent_slot = parent.map_or(MAIN, |parent| parent.slot);
        if branch.record.is_stale {
            self.freeze_for_fork(parent_slot)?;
        }
        let moved = self.replace_fork(branch, parent, left);
        if moved.as_ref().is_err_and(Error::is_as_before) && branch.record.is_stale {
            self.thaw(parent_slot, 1);
        }
        moved
    }

    fn replace_fork(
        &self,
        branch: &Branch,
        parent: Option<&Branch>,
        left: &BTreeSet<PathBuf>,
    ) -> Result<(), Error> {
        if !branch.record.is_stale && self.is_by_kernel(branch)? {
            self.leave_to_fuse(branch)?; // the kernel has the old fork mounted
        }
        if let Some(parent) = parent {
            self.freeze_presented(parent.record.id)?;
            Work::of(branch)?.take_attributes(&Work::since(parent, branch)?)?;
        }
        let own = &branch.stack[..branch.record.layers.len()];
        let below = parent.map_or(vec![Arc::clone(&self.base)], |parent| parent.stack.clone());
        let stack: Vec<Arc<Layer>> = own.iter().cloned().chain(below).collect();
        let mut record = branch.record.clone();
        record.is_stale = false;
        record.created = now();
        record.below = parent.map_or(Vec::new(), |parent| {
            [&parent.record.layers[..], &parent.record.below].concat()
        });
        let base = parent.is_none().then(|| self.disk()).transpose()?;
        self.sync_store()?; // what the record stands for
        let mut branches = self.lock();
        self.records.append(&[Line::of(&record)])?; // the commit point
        let synced = self.records.sync();
        let gate = self.filesystem.close_gate();
        let old = self.replace_view(&mut branches, record, stack, branch.quota.clone());
        drop(gate);
        drop(branches);
        if let Some(old) = old {
            self.outdate(old);
        }
        if let Some(disk) = base {
            for (layer, number) in own.iter().zip(&branch.record.layers) {
                let path = self.layer_path(*number);
                let never = Expected::Present(Identity::NEVER);
                let now = |path: &Path| match left.contains(path) {
                    true => Ok(never),
                    false => present(&disk, path),
                };
                let noted = layer
                    .see_again(now)
                    .and_then(|()| left.iter().try_for_each(|path| layer.saw(path, never)));
                if let Err(error) = noted {
                    // The older notes may report a conflict that is none, and lose nothing.
                    tracing::warn!("cannot rewrite the write set in {}: {error}", path.display());
                }
            }
        }
        synced.map_err(|source| {
            let error = Error::Incomplete { what: "rebase", source: Box::new(source) };
            self.fail_stop.trip(error.to_string());
            error
        })?;
        self.drop_unused_snapshots(&self.lock(), &branch.record.below);
        tracing::info!("rebased branch {:?}", branch.record.name);
        Ok(())
    }
}

/// What others did in the parent of a branch since its fork, as far as it concerns the branch.
struct Obstacles {
    /// Paths that both changed.
    conflicts: BTreeSet<PathBuf>,
    /// Directories of the base that the branch has in its layers, with the attributes of both sides.
    merged: Vec<(PathBuf, Metadata)>,
}

impl Obstacles {
    /// Gives the directories in the branch's layers the attributes that others set since the fork, where the branch set none:
    /// its copies would hide them.
    fn merge_attributes(&self, branch: &Branch) -> Result<(), Error> {
        let own = &branch.stack[..branch.record.layers.len()];
        for (path, merged) in &self.merged {
            for layer in own {
                match layer.tree.stat(path) {
                    Err(Errno::NOENT | Errno::NOTDIR) => continue,
                    other => drop(other.at(path)?),
                }
                let mut wanted = merged.clone();
                (wanted.atime, wanted.mtime) = commit::times_of(&layer.tree.stat(path).at(path)?);
                commit::set_metadata(&layer.tree, path, &wanted).at(path)?;
                break;
            }
        }
        Ok(())
    }
}

/// What the base has at a path.
fn present(disk: &Disk, path: &Path) -> Result<Expected, Errno> {
    match disk.base.stat(path) {
        Ok(stat) => Ok(Expected::Present(identity(&stat))),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(Expected::Absent),
        Err(error) => Err(error),
    }
}

fn conflict(name: &str, paths: BTreeSet<PathBuf>) -> Error {
    Error::Conflict {
        message: format!(
            "branch {name} cannot be rebased: its parent has changed at the same paths since the fork"
        ),
        paths: paths.into_iter().collect(),
        hint: "the branch is unchanged: rebase with --force to keep its version of these paths, or abort it",
    }
}
