//! Committing a branch into its parent: into the base by a transaction, or into a branch ([`super::commit_into_branch`]).
//!
//! [`Commit::run`] is the whole commit: validate, quiesce, plan, log, apply, publish. Each phase is a function of that
//! name here; log, apply and publish are those of every transaction ([`super::transaction_engine`]).

#[cfg(test)]
use std::collections::BTreeSet;

use super::branch_table::Remainder;
use super::branches::has_no_live_children;
use super::change_set::ChangeSet;
use super::commit_checks::{commit_header, sibling_won, validated_plan};
use super::commit_into_branch::{commit_to_branch, refuse_nested};
use super::commit_options::{CommitOptions, policy};
use super::driver_sync::hand_over_to_fuse;
use super::partial_commit::{estimate_rest, make_rest};
use super::rebase::Resolution;
use super::transaction_engine::{Applied, Logged, affected_branches};
use super::{Branch, BranchRef, Branches, Committed, MAIN_BRANCH, Policy, Store, Workspace};
use crate::error::{Context, Error};
use crate::mount::FreezeGuard;
use crate::overlayfs_upper::NormaliseFor;
#[cfg(test)]
use crate::path_filter::PathFilter;
use crate::transaction::{Header, Plan, TransactionRoots};
use crate::view::Brought;

impl Workspace {
    /// Commits a branch into its parent.
    ///
    /// # Errors
    /// `Conflict` (a sibling was committed first, or external changes), `Frozen`, `Busy`, `Io`. Parent and branch are
    /// unchanged then.
    pub fn commit(
        &self,
        selector: &BranchRef,
        options: &CommitOptions,
    ) -> Result<Committed, Error> {
        let options = &rebase_first(self, selector, options)?;
        let _frozen = if options.dry_run { None } else { self.table.quiesce(selector)? };
        let _transaction_lock = self.engine.begin_transaction()?;
        let guard = self
            .table
            .hold(selector, has_no_live_children)?
            .ok_or_else(|| Error::Usage("main has no parent to commit to".to_owned()))?;
        let committed = Commit { workspace: self, branch: &guard.branch, options }.run();
        drop(guard);
        self.table.thaw_idle(&self.table.lock());
        committed
    }
}

/// Rebases a stale branch before its commit. Returns the options of the commit, which leaves out the paths to skip.
fn rebase_first(
    workspace: &Workspace,
    selector: &BranchRef,
    options: &CommitOptions,
) -> Result<CommitOptions, Error> {
    let mut options = options.clone();
    let is_stale =
        || Ok(selector.find(&workspace.table.lock())?.is_some_and(|branch| branch.record.is_stale));
    if !options.rebase || !is_stale()? {
        return Ok(options);
    }
    let resolution = match (options.force, options.skip) {
        (true, _) => Resolution::Override,
        (false, true) => Resolution::Leave,
        (false, false) => Resolution::Refuse,
    };
    let conflicts = workspace.rebase(selector, resolution, options.dry_run)?;
    if options.skip {
        options.selection.skip(conflicts);
    }
    Ok(options)
}

/// A commit in progress: no other transaction runs, and no other verb uses the branch.
struct Commit<'w> {
    workspace: &'w Workspace,
    branch: &'w Branch,
    options: &'w CommitOptions,
}

/// The result of validation.
enum Verdict {
    MayCommit,
    ChangesNothing,
}

/// The branch is not written while this exists.
struct Quiesced(FreezeGuard);

/// The result of planning.
enum Outcome {
    /// The base changes.
    Steps(Box<InPhase<Planned>>),
    /// The base does not change; the commit is done.
    Done(Committed),
}

/// The steps of a commit, and the header of its journal entry.
struct Planned {
    plan: Plan,
    header: Header,
}

/// A commit between two phases.
struct InPhase<T> {
    disk: TransactionRoots,
    /// The new layer for the changes that a partial commit leaves in the branch.
    rest: Option<Remainder>,
    /// Copies of the branch's layers on the base's file system, with an external store.
    staged: Vec<u64>,
    state: T,
}

impl<T> InPhase<T> {
    /// Runs the next phase. If it fails, removes the layers that were created for the commit, unless objects of the
    /// base may be in them or the next mount may need them.
    fn next<U>(
        self,
        store: &Store,
        phase: impl FnOnce(&TransactionRoots, T) -> Result<U, Error>,
    ) -> Result<InPhase<U>, Error> {
        let Self { disk, rest, staged, state } = self;
        match phase(&disk, state) {
            Ok(state) => Ok(InPhase { disk, rest, staged, state }),
            Err(error) => {
                if error.is_as_before() {
                    rest.iter().for_each(|rest| store.remove_rest(rest.layer.id.0));
                    store.unstage(&staged);
                }
                Err(error)
            }
        }
    }
}

impl<'w> Commit<'w> {
    /// Commits the branch. The phases are described in docs/architecture.md.
    fn run(&self) -> Result<Committed, Error> {
        if let Verdict::ChangesNothing = self.validate()? {
            return self.commit_nothing();
        }
        if self.options.dry_run {
            return self.preview();
        }
        let quiesced = self.quiesce()?;
        if self.branch.record.parent != MAIN_BRANCH {
            let committed = commit_to_branch(self.workspace, self.branch, self.options);
            return quiesced
                .end(committed.and_then(|one| one.map_or_else(|| self.commit_nothing(), Ok)));
        }
        let planned = match self.plan()? {
            Outcome::Steps(planned) => *planned,
            Outcome::Done(committed) => return Ok(committed),
        };
        let logged = self.log(planned);
        let applied = logged.and_then(|logged| self.apply(logged));
        quiesced.end(applied.and_then(|applied| self.publish(applied)))
    }

    /// Refuses commits that are not possible, as far as this can be decided without the branch's changes.
    fn validate(&self) -> Result<Verdict, Error> {
        let Self { workspace, branch, options } = self;
        if branch.record.is_stale && !(options.rebase && options.dry_run) {
            // A stale branch can be committed only if it changed nothing.
            return match ChangeSet::of(branch)?.is_empty()? {
                true => Ok(Verdict::ChangesNothing),
                false => Err(sibling_won(&branch.record.name)),
            };
        }
        if branch.record.parent != MAIN_BRANCH && (options.skip || !options.selection.is_all()) {
            return Err(Error::Unsupported(
                "paths can be chosen only in a commit into main: commit the whole branch into its \
                    parent"
                    .to_owned(),
            ));
        }
        let is_serializable = policy(workspace, options) == Policy::Serializable;
        if is_serializable && workspace.driver.current().name() != "fuse" {
            return Err(Error::Unsupported(
                "the overlay driver does not record what a branch reads, which the policy serializable needs; mount with --driver fuse"
                    .to_owned(),
            ));
        }
        let mounted = workspace.table.mounted(branch)?;
        if !branch.stack[0].is_created() && branch.record.layers.len() == 1 {
            return Ok(Verdict::ChangesNothing);
        }
        mounted.lock().tree.make_layer().at(&workspace.store.base_path)?; // what follows expects the top layer on disk
        Ok(Verdict::MayCommit)
    }

    /// Reports what the commit would do, and changes nothing.
    fn preview(&self) -> Result<Committed, Error> {
        let Self { workspace, branch, options } = self;
        if branch.record.parent != MAIN_BRANCH {
            let parent = workspace.table.parent_of(branch)?;
            let (ours, theirs) = (ChangeSet::of(branch)?, ChangeSet::since_fork(&parent, branch)?);
            refuse_nested(workspace, branch, (&ours, &theirs), options)?;
            return Ok(Committed { changes: ours.changes, ..Committed::default() });
        }
        let _staged = workspace.stage(branch)?;
        let plan = validated_plan(workspace, branch, options)?;
        let forgotten = workspace.engine.forgotten_by(&plan)?;
        let remaining = estimate_rest(branch, &plan)?;
        Ok(Committed { changes: plan.changes, remaining, forgotten, ..Committed::default() })
    }

    /// Stops all writes in the branch. Files that are open for writing refuse the commit.
    fn quiesce(&self) -> Result<Quiesced, Error> {
        let Self { workspace, branch, .. } = self;
        let frozen = workspace.table.mounted(branch)?.freeze();
        workspace.table.refuse_open_files(branch)?;
        workspace.driver.current().freeze(branch.record.id, self.completion())?;
        Ok(Quiesced(frozen))
    }

    /// How completely the driver normalises the layer. A metacopy stands for the file of the base, unless siblings stay
    /// live: their snapshot would need a copy of each, made while all requests wait. Files that stay in the branch are
    /// complete, too.
    fn completion(&self) -> NormaliseFor {
        let Self { workspace, branch, options } = self;
        let branches = workspace.table.lock();
        let mut siblings = branches.children(branch.record.parent);
        let has_siblings = siblings.any(|one| one.record.id != branch.record.id);
        let keeps_snapshots = has_siblings && policy(workspace, options) != Policy::FirstWinner;
        if options.keeps_rest() || keeps_snapshots {
            NormaliseFor::Whole
        } else {
            NormaliseFor::ForCommit
        }
    }

    /// Plans the steps, and refuses conflicts. Completes the objects that the base will get, and creates the layer of
    /// the rest.
    fn plan(&self) -> Result<Outcome, Error> {
        let Self { workspace, branch, options } = self;
        let store = &workspace.store;
        prepare_rest(workspace, branch, options)?;
        // Before the plan is logged, since files that are renamed into the base must be complete. A refused commit
        // copies nothing, except with an external store, where all is copied before planning.
        let mounted = workspace.table.mounted(branch)?;
        let incomplete = mounted.lock().tree.layers.partial_copies()?;
        if !incomplete.is_empty() && !store.is_external() {
            validated_plan(workspace, branch, options)?;
        }
        let brought = Brought::bring(incomplete)?;
        mounted.lock().tree.link_all_copied_up().at(&store.base_path)?;
        let staged = workspace.stage(branch)?;
        let plan = validated_plan(workspace, branch, options)?;
        if plan.changes_nothing() && !plan.rest.is_empty() {
            let remaining = estimate_rest(branch, &plan)?;
            return Ok(Outcome::Done(Committed { remaining, ..Committed::default() }));
        }
        if plan.changes_nothing() {
            return self.commit_nothing().map(Outcome::Done);
        }
        if workspace.table.has_stale() && workspace.engine.drops_history(&plan)? {
            workspace.complete_stale_branches()?;
        }
        brought.finish()?;
        let rest = make_rest(workspace, branch, &plan.rest)?;
        let rest_id = rest.as_ref().map(|rest| rest.layer.id.0);
        let disk = workspace.engine.disk()?;
        for whiteout in &plan.stray_whiteouts {
            disk.remove_file(whiteout)
                .inspect_err(|_| rest_id.iter().for_each(|rest| store.remove_rest(*rest)))?;
        }
        let header = commit_header(branch, &plan, rest_id);
        let state = Planned { plan, header };
        Ok(Outcome::Steps(Box::new(InPhase { disk, rest, staged: staged.hand_over(), state })))
    }

    /// Makes the plan durable in the journal: the commit point.
    fn log(&self, planned: InPhase<Planned>) -> Result<InPhase<Logged<'w>>, Error> {
        let engine = &self.workspace.engine;
        let (id, policy) = (self.branch.record.id, policy(self.workspace, self.options));
        planned.next(&self.workspace.store, |disk, Planned { plan, header }| {
            engine.log(disk, plan, |branches: &Branches| {
                Ok(engine.set_affected(header, affected_branches(branches, policy, Some(id), None)))
            })
        })
    }

    /// Carries out the steps on the base.
    fn apply(&self, logged: InPhase<Logged<'w>>) -> Result<InPhase<Applied<'w>>, Error> {
        let engine = &self.workspace.engine;
        logged.next(&self.workspace.store, |disk, logged| engine.apply(disk, logged))
    }

    /// Makes the result visible and durable, and ends the branch or continues with its rest.
    fn publish(&self, applied: InPhase<Applied<'w>>) -> Result<Committed, Error> {
        let InPhase { disk, rest, state, .. } = applied;
        self.workspace.engine.publish(&disk, state, rest)
    }

    /// Ends a branch whose commit would change nothing: the parent, the history and the siblings do not change.
    fn commit_nothing(&self) -> Result<Committed, Error> {
        if !self.options.dry_run {
            let table = &self.workspace.table;
            let mut branches = table.lock();
            table.abort_below(&mut branches, self.branch.record.id)?;
            drop(branches);
            self.workspace.store.empty_trash();
        }
        Ok(Committed::default())
    }
}

impl Quiesced {
    /// Thaws the branch, unless its layers may hold objects of the base.
    fn end(self, committed: Result<Committed, Error>) -> Result<Committed, Error> {
        if committed.as_ref().is_err_and(|error| !error.is_as_before()) {
            self.0.keep();
        }
        committed
    }
}

/// Hands a branch that overlayfs wrote and that keeps a rest over to the FUSE view, as a rebase does: the kernel cannot
/// mount the layer of the rest.
fn prepare_rest(
    workspace: &Workspace,
    branch: &Branch,
    options: &CommitOptions,
) -> Result<(), Error> {
    if !options.keeps_rest() || !workspace.store.is_written_by_overlayfs(branch)? {
        return Ok(());
    }
    let staged = workspace.stage(branch)?;
    let keeps_any = !validated_plan(workspace, branch, options)?.rest.is_empty();
    drop(staged);
    if keeps_any { hand_over_to_fuse(workspace, branch) } else { Ok(()) }
}

#[cfg(test)]
impl Workspace {
    /// The plan of a branch's commit, and the header its commit would have.
    pub(crate) fn plan_for_tests(
        &self,
        name: &str,
        selection: PathFilter,
    ) -> Result<(TransactionRoots, Header, Plan), Error> {
        let branches = self.table.lock();
        let branch = BranchRef::Name(name.to_owned())
            .find(&branches)?
            .ok_or_else(|| Error::NotFound(name.to_owned()))?;
        let mounted = self.table.mounted(branch)?;
        mounted.lock().tree.make_layer().at(&self.store.base_path)?;
        let options = CommitOptions { selection: selection.clone(), ..CommitOptions::default() };
        prepare_rest(self, branch, &options)?;
        mounted.lock().tree.link_all_copied_up().at(&self.store.base_path)?;
        self.stage(branch)?.hand_over();
        let plan = super::commit_checks::plan(self, branch, selection, false, &BTreeSet::new())?;
        let rest = make_rest(self, branch, &plan.rest)?.map(|rest| rest.layer.id.0);
        Ok((self.engine.disk()?, commit_header(branch, &plan, rest), plan))
    }
}
