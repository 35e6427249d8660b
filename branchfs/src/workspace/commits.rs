//! Committing a branch: into the base through [`crate::commit`], or into a parent branch ([`super::commit_into_branch`]).

use super::branches::Branches;
use super::commit_into_branch::Work;
use super::planning::{commit_header, too_late};
use super::rebase::Resolution;
use super::rest::estimate_rest;
use super::{Branch, BranchId, Committed, MAIN_BRANCH, Policy, Selector, Workspace, children_of};
use crate::driver::{self, Completion};
use crate::error::{Context, Error};
use crate::filesystem::MAIN;
use crate::selection::Selection;
use crate::tree::remove_path;
use crate::view::Brought;

/// What a commit is asked to be.
#[derive(Clone, Debug, Default)]
pub(crate) struct CommitOptions {
    /// Overwrite what others did.
    pub(crate) force: bool,
    /// Show what would change, and change nothing.
    pub(crate) dry_run: bool,
    /// Instead of the mount's.
    pub(crate) policy: Option<Policy>,
    /// Leave what others changed as it is, and commit the rest.
    pub(crate) skip: bool,
    /// What to commit; the branch goes on with the rest.
    pub(crate) selection: Selection,
    /// The rest goes with the branch.
    pub(crate) drop_rest: bool,
    /// Fork a branch anew first if a sibling was committed before it; conflicts are found by path.
    pub(crate) rebase: bool,
}

impl CommitOptions {
    /// Whether something may stay in the branch.
    fn keeps_rest(&self) -> bool {
        !self.drop_rest && (self.skip || !self.selection.is_all())
    }
}

impl Workspace {
    /// Commits a branch into its parent.
    ///
    /// # Errors
    /// `Stale` siblings' commits are `Conflict`; `Frozen`, `Busy`, `Conflict` (drift, or commits of others), `Io`. Parent
    /// and branch are as before then.
    pub(crate) fn commit(
        &self,
        selector: &Selector,
        options: &CommitOptions,
    ) -> Result<Committed, Error> {
        let mut options = options.clone();
        self.rebase_first(selector, &mut options)?;
        let options = &options;
        let _frozen = if options.dry_run { None } else { self.await_writers(selector)? };
        let _turn = self.begin_transaction()?;
        let held = self
            .hold(selector, has_no_live_children)?
            .ok_or_else(|| Error::Usage("main has no parent to commit to".to_owned()))?;
        let branch = &held.branch;
        if branch.record.is_stale && !(options.rebase && options.dry_run) {
            return self.commit_stale(branch, options);
        }
        let (id, parent) = (branch.record.id, branch.record.parent);
        if parent != MAIN_BRANCH && (options.skip || !options.selection.is_all()) {
            return Err(Error::Unsupported(
                "paths can be chosen in a commit into main alone: commit all of it into its parent"
                    .to_owned(),
            ));
        }
        if self.policy(options) == Policy::Serializable && self.driver().name() != "fuse" {
            return Err(Error::Unsupported(
                "the overlay driver does not record what a branch reads, which the policy serializable needs; mount with --driver fuse"
                    .to_owned(),
            ));
        }
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        if !branch.stack[0].is_made() && branch.record.layers.len() == 1 {
            return self.commit_nothing(branch, options);
        }
        mounted.lock().make_layer().at(&self.base_path)?; // what follows expects the top layer on disk
        if options.dry_run && parent != MAIN_BRANCH {
            let above = self.parent_of(branch)?;
            let (ours, theirs) = (Work::of(branch)?, Work::since(&above, branch)?);
            self.refuse_nested(branch, (&ours, &theirs), options)?;
            return Ok(Committed { changes: ours.changes, ..Committed::default() });
        }
        if options.dry_run {
            let _staged = self.stage(id, &branch.record)?;
            let plan = self.checked_plan(branch, options)?;
            let forgotten = self.forgotten_by(&plan)?;
            let remaining = estimate_rest(branch, &plan)?;
            return Ok(Committed {
                changes: plan.changes,
                stale: Vec::new(),
                remaining,
                forgotten,
            });
        }
        mounted.freeze();
        let closed = self
            .refuse_writers(branch)
            .and_then(|()| self.driver().freeze(id, self.completion_for(branch, options)));
        let outcome = closed.and_then(|()| match parent {
            MAIN_BRANCH => self.commit_to_base(branch, options),
            _ => self.commit_to_branch(branch, options),
        });
        // A branch whose layers may hold objects of the base stays read-only.
        if outcome.as_ref().map_or_else(Error::is_as_before, |done| done.remaining > 0) {
            mounted.thaw();
        }
        drop(held);
        self.thaw_presented(&self.lock());
        outcome
    }

    /// Rebases a stale branch that is to be committed all the same. What is to be skipped is left out of the commit.
    fn rebase_first(&self, selector: &Selector, options: &mut CommitOptions) -> Result<(), Error> {
        let is_stale =
            || Ok(selector.find(&self.lock())?.is_some_and(|branch| branch.record.is_stale));
        if !options.rebase || !is_stale()? {
            return Ok(());
        }
        let resolution = match (options.force, options.skip) {
            (true, _) => Resolution::Override,
            (false, true) => Resolution::Leave,
            (false, false) => Resolution::Refuse,
        };
        let conflicts = self.rebase(selector, resolution, options.dry_run)?;
        if options.skip {
            options.selection.skip(conflicts);
        }
        Ok(())
    }

    /// Files of which only the attributes changed stand for those of the base, unless siblings live on: their snapshot
    /// would need a copy of each, made while all requests wait. What stays in the branch is whole, too.
    fn completion_for(&self, branch: &Branch, options: &CommitOptions) -> Completion {
        let id = branch.record.id;
        let has_siblings =
            self.lock().children(branch.record.parent).any(|one| one.record.id != id);
        if options.keeps_rest() || has_siblings && self.policy(options) != Policy::FirstWinner {
            Completion::Whole
        } else {
            Completion::ForCommit
        }
    }

    fn commit_to_base(&self, branch: &Branch, options: &CommitOptions) -> Result<Committed, Error> {
        let id = branch.record.id;
        self.prepare_rest(branch, options)?;
        // Before the commit is decided: what is renamed into the base must be whole. A commit that is refused
        // copies nothing, but where the store is elsewhere: there all is copied before it can be planned.
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        let unfinished = mounted.lock().partial_copies()?;
        if !unfinished.is_empty() && !self.is_elsewhere() {
            self.checked_plan(branch, options)?;
        }
        let brought = Brought::bring(unfinished)?;
        mounted.lock().join_all_links().at(&self.base_path)?;
        let staged = self.stage(id, &branch.record)?;
        let plan = self.checked_plan(branch, options)?;
        if plan.changes_nothing() && !plan.rest.is_empty() {
            let remaining = estimate_rest(branch, &plan)?;
            return Ok(Committed { remaining, ..Committed::default() });
        }
        if plan.changes_nothing() {
            return self.commit_nothing(branch, options);
        }
        brought.finish()?;
        let rest = self.make_rest(branch, &plan.rest)?;
        let rest_id = rest.as_ref().map(|rest| rest.layer.id.0);
        let unmake = |error: &Error| {
            // After an incomplete rollback objects of the base may be there, or the next mount may need it.
            if error.is_as_before() {
                rest_id.iter().for_each(|rest| self.unmake_rest(*rest));
            }
        };
        let disk = self.disk()?;
        for litter in &plan.litter {
            disk.remove_file(litter).inspect_err(unmake)?;
        }
        let header = commit_header(branch, &plan, rest_id);
        let staged = staged.hand_over();
        let address = |branches: &Branches| {
            Ok(self.address(header, self.audience(branches, self.policy(options), Some(id), None)))
        };
        let happened = self.transact(&disk, plan, address).inspect_err(|error| {
            unmake(error);
            if error.is_as_before() {
                self.unstage(&staged);
            }
        })?;
        self.conclude(&disk, happened, rest)
    }

    /// What the kernel wrote and a commit leaves is left to the FUSE view, as after a rebase: the kernel cannot mount the
    /// layer of the rest.
    pub(super) fn prepare_rest(
        &self,
        branch: &Branch,
        options: &CommitOptions,
    ) -> Result<(), Error> {
        if !options.keeps_rest() || !self.is_by_kernel(branch)? {
            return Ok(());
        }
        let staged = self.stage(branch.record.id, &branch.record)?;
        let is_left = !self.checked_plan(branch, options)?.rest.is_empty();
        drop(staged);
        if is_left { self.leave_to_fuse(branch) } else { Ok(()) }
    }

    /// Ends a branch whose commit would change nothing: the parent, the history and the siblings stay as they are.
    pub(super) fn commit_nothing(
        &self,
        branch: &Branch,
        options: &CommitOptions,
    ) -> Result<Committed, Error> {
        if !options.dry_run {
            let mut branches = self.lock();
            self.abort_below(&mut branches, branch.record.id)?;
            self.thaw_presented(&branches);
            drop(branches);
            self.empty_trash();
        }
        Ok(Committed::default())
    }

    /// A stale branch can be committed only if it changed nothing.
    fn commit_stale(&self, branch: &Branch, options: &CommitOptions) -> Result<Committed, Error> {
        if Work::of(branch)?.is_empty()? {
            return self.commit_nothing(branch, options);
        }
        Err(too_late(&branch.record.name))
    }

    /// Takes a branch out of the table whose commit to the base has happened. Its record ends with the transaction.
    pub(super) fn retire_committed(&self, branches: &mut Branches, id: BranchId) {
        let Some(mut committed) = branches.remove(&id) else { return };
        self.thaw(MAIN, 1);
        if !self.is_elsewhere() {
            committed.record.layers.clear(); // they go with the commit
        }
        self.retire_branch(branches, &committed);
    }

    /// What was committed has one link too many as long as its layer keeps one of its own.
    pub(super) fn unlink_kept(&self, layers: &[u64]) -> Result<(), Error> {
        for layer in layers {
            driver::drop_index(&self.layer_path(*layer))?;
            let links = self.layer_path(*layer).join("links");
            remove_path(&links).at(&links)?;
        }
        Ok(())
    }
}

pub(super) fn has_no_live_children(branches: &Branches, branch: &Branch) -> Result<(), Error> {
    let name = &branch.record.name;
    let children = children_of(branches, branch.record.id);
    if children.is_empty() {
        return Ok(());
    }
    Err(Error::Frozen { name: name.clone(), children: children.join(", ") })
}
