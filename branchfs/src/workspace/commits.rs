//! Committing a branch: into the base through [`crate::commit`], into a parent branch by stacking its layers.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard, RwLockWriteGuard};
use std::thread;
use std::time::{Duration, Instant};

use super::branches::Branches;
use super::nested::Work;
use super::records::{Absorbed, Line};
use super::{
    Branch, BranchId, Committed, MAIN_BRANCH, Policy, Selector, Workspace, below, children_of, now,
};
use crate::commit::{self, Decided, Disk, Header, Kind, Plan, Prepared, Request, VERSION, Woven};
use crate::driver::{self, Completion};
use crate::error::{Context, Error};
use crate::filesystem::{MAIN, Mounted, Slot};
use crate::layer::Layer;
use crate::seen::WriteSet;
use crate::selection::Selection;
use crate::view::{HIDDEN, Unfinished, View};

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
    /// What to commit; the rest goes with the branch.
    pub(crate) selection: Selection,
}

const WRITTEN_BY_OTHERS: &str = "others committed changes of the same paths since the fork";
const CHANGED_AFTER_READ: &str = "others committed changes of what it read since the fork";

/// How long a commit waits for files that are being closed.
const WRITERS_WAIT_MAX: Duration = Duration::from_secs(1);

/// Keeps a branch from being changed as long as it lives.
pub(super) struct Frozen(Arc<Mounted>);

impl Frozen {
    fn new(mounted: Arc<Mounted>) -> Self {
        mounted.freeze();
        Self(mounted)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.0.thaw();
    }
}

/// A transaction that has happened, and of which nobody has seen anything yet.
pub(super) struct Happened<'w> {
    branches: MutexGuard<'w, Branches>,
    gate: RwLockWriteGuard<'w, ()>,
    decided: Decided,
    /// What others go on seeing the base through.
    veil: Option<(Arc<Layer>, Woven)>,
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
        let _frozen = if options.dry_run { None } else { self.await_writers(selector)? };
        let _turn = self.take_turn();
        let held = self
            .hold(selector, may_be_committed)?
            .ok_or_else(|| Error::Usage("main has no parent to commit to".to_owned()))?;
        let branch = &held.branch;
        let (id, parent) = (branch.record.id, branch.record.parent);
        if parent != MAIN_BRANCH && (options.skip || !options.selection.is_all()) {
            return Err(Error::Unsupported(
                "paths can be chosen in a commit into main alone: commit all of it into its parent"
                    .to_owned(),
            ));
        }
        if self.policy(options) != Policy::FirstWinner && self.driver().name() != "fuse" {
            return Err(Error::Unsupported(
                "the overlay driver serves the policy first-winner alone; mount with --driver fuse"
                    .to_owned(),
            ));
        }
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        // A commit of nothing is one too: what follows knows no branch without a layer.
        mounted.lock().make_layer().at(&self.base_path)?;
        if options.dry_run && parent != MAIN_BRANCH {
            let above = self.parent_of(branch)?;
            let (ours, theirs) = (Work::of(branch)?, Work::since(&above, branch)?);
            self.refuse_nested(branch, (&ours, &theirs), options)?;
            return Ok(Committed { changes: ours.changes, stale: Vec::new() });
        }
        if options.dry_run {
            let _staged = self.stage(id, &branch.record)?;
            let plan = self.checked_plan(branch, options);
            return Ok(Committed { changes: plan?.changes, stale: Vec::new() });
        }
        mounted.freeze();
        let closed = self
            .refuse_writers(branch)
            .and_then(|()| self.driver().freeze(id, Completion::ForCommit));
        let outcome = closed.and_then(|()| match parent {
            MAIN_BRANCH => self.commit_to_base(branch, options),
            _ => self.commit_to_branch(branch, options),
        });
        if outcome.is_err() {
            mounted.thaw();
        }
        drop(held);
        self.thaw_presented(&self.lock());
        outcome
    }

    fn parent_of(&self, branch: &Branch) -> Result<Branch, Error> {
        let parent = branch.record.parent;
        self.lock().get(&parent).cloned().ok_or_else(|| Error::NotFound(parent.to_string()))
    }

    fn policy(&self, options: &CommitOptions) -> Policy {
        options.policy.unwrap_or(self.settings.policy)
    }

    /// The plan of a commit into main that nothing stands against, or that is forced.
    fn checked_plan(&self, branch: &Branch, options: &CommitOptions) -> Result<Plan, Error> {
        let record = &branch.record;
        let theirs = self.theirs(record)?;
        let policy = self.policy(options);
        let reads = match policy {
            Policy::Serializable => self.reads(record)?,
            Policy::FirstWinner | Policy::Snapshot => Vec::new(),
        };
        if policy == Policy::FirstWinner && !theirs.is_empty() && !options.force {
            return Err(too_late(&record.name));
        }
        let mut selection = options.selection.clone();
        loop {
            let plan = self.plan(branch, selection.clone())?;
            refuse_nothing_chosen(branch, &plan, &selection)?;
            self.refuse_other_stores(&plan)?;
            if options.force {
                return Ok(plan);
            }
            let written = theirs.against(&plan.changes, &plan.written);
            if options.skip && selection.skip(written.iter().chain(&plan.drift).cloned()) {
                continue; // each turn leaves out more, so there are no more turns than paths
            }
            let name = &record.name;
            refuse(name, WRITTEN_BY_OTHERS, &written)?;
            refuse(name, CHANGED_AFTER_READ, &theirs.against_reads(&reads))?;
            refuse(name, "the base was changed by others since the fork", &plan.drift)?;
            return Ok(plan);
        }
    }

    /// The store of a workspace below the base is a directory like others in a branch, and others' branches: what was
    /// changed in a copy of it would damage them.
    fn refuse_other_stores(&self, plan: &Plan) -> Result<(), Error> {
        let is_store = |path: &Path| {
            path.file_name() == Some(OsStr::new(HIDDEN))
                && self.base.tree.stat(&path.join("format")).is_ok()
        };
        let paths =
            plan.changes.iter().flat_map(|change| [Some(&change.path), change.from.as_ref()]);
        match paths.flatten().flat_map(|path| path.ancestors()).find(|path| is_store(path)) {
            None => Ok(()),
            Some(store) => Err(Error::Unsupported(format!(
                "{} is the store of another workspace, and the branch has changed it: commit with --exclude {HIDDEN}, which leaves it as it is",
                store.display()
            ))),
        }
    }

    fn plan(&self, branch: &Branch, selection: Selection) -> Result<Plan, Error> {
        self.driver().settle(branch.record.id)?;
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        mounted.lock().join_all_links().at(&self.base_path)?;
        let mut seen = BTreeMap::new();
        let mut origins = HashMap::new();
        for layer in branch.record.layers.iter().rev() {
            let log = self.layer_path(*layer).join("writes");
            let loaded = WriteSet::load(&log).at(&log)?;
            for (path, expected) in loaded.seen {
                seen.entry(path).or_insert(expected);
            }
            if !self.is_elsewhere() {
                origins.extend(loaded.origins); // copies that are staged have other numbers
            }
        }
        let disk = self.disk()?;
        let traces = self.traces(&disk)?;
        self.seen_by_kernel(branch, &traces, &mut seen)?;
        let layers = branch
            .record
            .layers
            .iter()
            .map(|layer| Path::new("layers").join(layer.to_string()).join("upper"))
            .collect();
        let request = Request {
            transaction: self.next_number(),
            layers,
            namespace: self.namespace,
            seen,
            forked: branch.record.created,
            by_kernel: self.is_by_kernel(branch),
            veils: self.veils_of(&branch.record),
            selection,
            traces,
            origins,
        };
        commit::plan(&disk, &request)
    }

    /// The plan of a branch's commit, and the header its commit would have.
    #[cfg(test)]
    pub(crate) fn plan_for_tests(&self, name: &str) -> Result<(Disk, Header, Plan), Error> {
        let branches = self.lock();
        let branch = Selector::Name(name.to_owned())
            .find(&branches)?
            .ok_or_else(|| Error::NotFound(name.to_owned()))?;
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        mounted.lock().make_layer().at(&self.base_path)?;
        self.stage(branch.record.id, &branch.record)?.hand_over();
        let plan = self.plan(branch, Selection::default())?;
        Ok((self.disk()?, commit_header(branch, &plan), plan))
    }

    /// Closing a file is told to us after the caller goes on: gives it a moment, in which other verbs go on. The branch is
    /// frozen from then on until the guard is dropped.
    fn await_writers(&self, selector: &Selector) -> Result<Option<Frozen>, Error> {
        self.await_none_of(selector, View::written)
    }

    /// The same before a fork, for those that the kernel serves by itself.
    pub(super) fn await_kernel_writers(
        &self,
        selector: &Selector,
    ) -> Result<Option<Frozen>, Error> {
        self.await_none_of(selector, View::written_by_kernel)
    }

    fn await_none_of(
        &self,
        selector: &Selector,
        files: impl Fn(&mut View) -> Vec<PathBuf>,
    ) -> Result<Option<Frozen>, Error> {
        let branches = self.lock();
        let Some(branch) = selector.find(&branches)?.filter(|branch| !branch.record.is_stale)
        else {
            return Ok(None);
        };
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        drop(branches);
        let frozen = Frozen::new(mounted);
        let deadline = Instant::now() + WRITERS_WAIT_MAX;
        while Instant::now() < deadline && !files(&mut frozen.0.lock()).is_empty() {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(Some(frozen))
    }

    fn refuse_writers(&self, branch: &Branch) -> Result<(), Error> {
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        let paths = mounted.lock().written();
        if paths.is_empty() {
            return Ok(());
        }
        Err(Error::Busy { name: branch.record.name.clone(), paths })
    }

    /// Freezes a branch that is about to be forked. What the kernel writes by itself no freezing stops: it must be
    /// closed, for which [`Self::await_kernel_writers`] has given time.
    pub(super) fn freeze_for_fork(&self, slot: Slot) -> Result<(), Error> {
        let mounted = self.filesystem.mounted(slot).at(&self.base_path)?;
        mounted.freeze();
        let paths = mounted.lock().written_by_kernel();
        if paths.is_empty() {
            return Ok(());
        }
        mounted.thaw();
        Err(Error::Written { name: mounted.name.to_string_lossy().into_owned(), paths })
    }

    fn commit_to_base(&self, branch: &Branch, options: &CommitOptions) -> Result<Committed, Error> {
        let id = branch.record.id;
        // Before the commit is decided: what is renamed into the base must be whole. A commit that is refused copies nothing.
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        let unfinished = mounted.lock().partial_copies()?;
        if !unfinished.is_empty() {
            self.checked_plan(branch, options)?;
            unfinished.iter().try_for_each(Unfinished::complete)?;
        }
        mounted.lock().join_all_links().at(&self.base_path)?;
        let staged = self.stage(id, &branch.record)?;
        let plan = self.checked_plan(branch, options)?;
        let disk = self.disk()?;
        for litter in &plan.litter {
            disk.remove_file(litter)?;
        }
        let header = commit_header(branch, &plan);
        let staged = staged.hand_over();
        let address = |branches: &Branches| {
            Ok(self.address(header, self.audience(branches, self.policy(options), Some(id), None)))
        };
        let happened = self.transact(&disk, plan, address).inspect_err(|error| {
            // What could not be taken back has put objects of the base there.
            if !matches!(error, Error::Corrupt(_)) {
                self.unstage(&staged);
            }
        })?;
        self.conclude(&disk, happened)
    }

    /// Takes a branch out of the table whose commit to the base has happened.
    fn retire_committed(&self, branches: &mut Branches, id: BranchId) -> Result<(), Error> {
        let Some(mut committed) = branches.remove(&id) else { return Ok(()) };
        self.unlink_kept(&committed.record)?;
        self.thaw(MAIN, 1);
        if !self.is_elsewhere() {
            committed.record.layers.clear(); // they go with the commit
        }
        self.retire_branch(branches, &committed)
    }

    /// What was committed has one link too many as long as its layer keeps one of its own.
    pub(super) fn unlink_kept(&self, record: &super::Record) -> Result<(), Error> {
        for layer in &record.layers {
            driver::drop_index(&self.layer_path(*layer))?;
            remove_tree(&self.layer_path(*layer).join("links"))?;
        }
        Ok(())
    }

    /// Decides a transaction and carries it out. `address` makes its header when it is about to happen. The table of
    /// branches is locked from there on; not before, while the file system syncs.
    ///
    /// # Errors
    /// It did not happen: main is as before, unless the error is `Corrupt`.
    pub(super) fn transact(
        &self,
        disk: &Disk,
        plan: Plan,
        address: impl FnOnce(&Branches) -> Result<Header, Error>,
    ) -> Result<Happened<'_>, Error> {
        let number = plan.transaction;
        let prepared = Prepared::new(disk, plan).inspect_err(|_| self.drop_journal(number))?;
        let branches = self.lock();
        let decided = address(&branches)
            .and_then(|header| prepared.decide(disk, header))
            .inspect_err(|_| self.drop_journal(number))?;
        let gate = self.filesystem.close_gate();
        match self.carry_out(disk, &decided) {
            Ok(veil) => Ok(Happened { branches, gate, decided, veil }),
            Err(error) => {
                drop(gate);
                if !matches!(error, Error::Corrupt(_)) {
                    // Without the note a later undo may be refused that need not be.
                    let _ = self.note_taken_back(disk, &decided);
                    self.drop_journal(number); // all is taken back: the entry holds nothing of the base
                }
                Err(error)
            }
        }
    }

    /// Lets everybody know of a transaction that has happened, makes it durable, and takes it into the history.
    ///
    /// # Errors
    /// Where it may not be durable, or something is left for the next mount to settle; it has happened.
    pub(super) fn conclude(&self, disk: &Disk, happened: Happened<'_>) -> Result<Committed, Error> {
        let Happened { mut branches, gate, decided, veil } = happened;
        for layer in [&self.base, &self.main_layer()] {
            layer.tree.forget_all();
        }
        let header = &decided.header;
        self.settle_stale(&mut branches, &header.stale);
        self.veil(&mut branches, header, veil.as_ref())?;
        drop(gate);
        let stale = names_of(&branches, &header.stale);
        if let Kind::Commit { branch } = header.kind {
            self.retire_committed(&mut branches, branch)?;
        }
        let concerned = header.stale.iter().chain(&header.observers).chain(&header.unveiled);
        self.append_records(&branches, concerned)?;
        drop(branches);
        // Together with the base, where they are on one file system. The journal forgets why only after it.
        let synced = Decided::sync(disk);
        if self.is_elsewhere() {
            self.records.sync()?;
        }
        self.drop_lifted(&self.lock(), header)?;
        self.keep(disk, &decided, self.oldest_fork())?;
        self.tell_stale(&self.lock(), &header.stale);
        self.filesystem.invalidate_main();
        self.empty_trash();
        synced.map_err(|error| Error::NotDurable(error.to_string()))?;
        Ok(Committed { stale, changes: decided.changes })
    }

    /// Under the gate: the steps, and the veil over them. When either fails, all is taken back.
    fn carry_out(
        &self,
        disk: &Disk,
        decided: &Decided,
    ) -> Result<Option<(Arc<Layer>, Woven)>, Error> {
        decided.apply(disk)?;
        let Some(id) = decided.header.veil else { return Ok(None) };
        match self.weave(disk, decided, id) {
            Ok(veil) => Ok(Some(veil)),
            Err(error) => {
                decided.take_back(disk)?;
                self.throw_away(&self.home_layer_path(id), "veil");
                Err(error)
            }
        }
    }

    fn main_layer(&self) -> Arc<Layer> {
        let main = self.filesystem.mounted(MAIN).expect("main is there as long as the mount");
        main.lock().top()
    }

    /// Refuses a commit into a branch against which something stands, unless it is forced.
    fn refuse_nested(
        &self,
        child: &Branch,
        (ours, theirs): (&Work, &Work),
        options: &CommitOptions,
    ) -> Result<(), Error> {
        let record = &child.record;
        let policy = self.policy(options);
        let reads = match policy {
            Policy::Serializable => self.reads(record)?,
            Policy::FirstWinner | Policy::Snapshot => Vec::new(),
        };
        let theirs = theirs.theirs();
        if options.force || theirs.is_empty() {
            return Ok(());
        }
        if policy == Policy::FirstWinner {
            return Err(too_late(&record.name));
        }
        let written = ours.against(&theirs);
        refuse(&record.name, WRITTEN_BY_OTHERS, &written)?;
        refuse(&record.name, CHANGED_AFTER_READ, &theirs.against_reads(&reads))
    }

    /// A commit into a parent branch: the child's layers become the parent's top. Nobody else's stack changes: what was
    /// forked before goes on seeing the parent as it was.
    fn commit_to_branch(
        &self,
        child: &Branch,
        options: &CommitOptions,
    ) -> Result<Committed, Error> {
        let (id, parent) = (child.record.id, child.record.parent);
        let above = &self.parent_of(child)?; // its layers do not change: that takes a commit
        let (ours, theirs) = (Work::of(child)?, Work::since(above, child)?);
        self.refuse_nested(child, (&ours, &theirs), options)?;
        ours.take_attributes(&theirs)?;
        let mounted = self.filesystem.mounted(above.slot).at(&self.base_path)?;
        mounted.lock().make_layer().at(&self.base_path)?; // only the top layer of a branch may be missing
        drop(mounted);
        let branches = self.lock();
        self.leave_to_fuse(above)?; // the kernel cannot mount what several layers make up
        drop(branches);
        // One rename of one record is the commit; what it names must be on disk first.
        self.sync_store()?;
        let mut branches = self.lock();
        let stale = match self.policy(options) {
            Policy::FirstWinner => {
                let mut rivals = below(&branches, parent);
                rivals.retain(|rival| *rival != id); // it has no live children
                rivals
            }
            Policy::Snapshot | Policy::Serializable => Vec::new(),
        };
        let own = child.record.layers.len();
        let stack: Vec<Arc<Layer>> =
            child.stack[..own].iter().chain(&above.stack).cloned().collect();
        let mut record = above.record.clone();
        record.layers = child.record.layers.iter().chain(&record.layers).copied().collect();
        record.absorbed = Some(Absorbed { child: id, stale: stale.clone() });
        self.write_records([&record])?;
        let slot = above.slot;
        let gate = self.filesystem.close_gate();
        self.settle_stale(&mut branches, &stale);
        let mounted = self.filesystem.mounted(slot).at(&self.base_path)?;
        let outdated = mounted.lock().restack(stack.clone(), None);
        drop(gate);
        let names = names_of(&branches, &stale);
        if let Some(above) = branches.get_mut(&parent) {
            (above.record, above.stack) = (record, stack);
        }
        self.thaw(slot, 1);
        if let Some(mut child) = branches.remove(&id) {
            if let Some(quota) = &child.quota {
                quota.lift();
            }
            child.record.layers.clear(); // they are the parent's now
            self.retire_branch(&branches, &child)?;
        }
        // Lines become durable in their order: what is absorbed is settled when the last of these is.
        if let Some(above) = branches.get_mut(&parent) {
            above.record.absorbed = None;
        }
        self.append_records(&branches, stale.iter().chain([&parent]))?;
        self.filesystem.invalidate_outdated(slot, &outdated);
        self.tell_stale(&branches, &stale);
        Ok(Committed { changes: ours.changes, stale: names })
    }

    /// Writes the records of those of the branches that there are. They are not synced.
    fn append_records<'i>(
        &self,
        branches: &Branches,
        ids: impl Iterator<Item = &'i BranchId>,
    ) -> Result<(), Error> {
        let found = ids.filter_map(|id| branches.get(id));
        self.records.append(&found.map(|branch| Line::of(&branch.record)).collect::<Vec<_>>())
    }

    /// Under the gate: from the next request on these branches answer ESTALE, and freeze nobody any more.
    fn settle_stale(&self, branches: &mut Branches, stale: &[BranchId]) {
        for id in stale {
            let Some(branch) = branches.get_mut(id) else { continue };
            branch.record.is_stale = true;
            self.filesystem.set_stale(branch.slot);
            let parent = branch.record.parent;
            self.thaw(branches.get(&parent).map_or(MAIN, |parent| parent.slot), 1);
        }
    }

    fn tell_stale(&self, branches: &Branches, stale: &[BranchId]) {
        for id in stale {
            let Some(branch) = branches.get(id) else { continue }; // aborted meanwhile
            self.driver().detach(*id);
            if let Ok(mounted) = self.filesystem.mounted(branch.slot) {
                self.outdate(mounted);
            }
        }
    }
}

fn may_be_committed(branches: &Branches, branch: &Branch) -> Result<(), Error> {
    let name = &branch.record.name;
    if branch.record.is_stale {
        return Err(too_late(name));
    }
    let children = children_of(branches, branch.record.id);
    if children.is_empty() {
        return Ok(());
    }
    Err(Error::Frozen { name: name.clone(), children: children.join(", ") })
}

/// A branch is committed once: what is not chosen goes with it. What is left out because others changed it was given up.
fn refuse_nothing_chosen(branch: &Branch, plan: &Plan, selection: &Selection) -> Result<(), Error> {
    let takes_any =
        !plan.changes.is_empty() || plan.written.iter().any(|path| selection.takes(path));
    if takes_any || selection.is_all() || selection.skips_any() {
        return Ok(());
    }
    let changes = Work::of(branch)?.changes;
    let Some(first) = changes.first() else { return Ok(()) };
    Err(Error::NothingChosen {
        name: branch.record.name.clone(),
        count: changes.len(),
        first: first.path.clone(),
        wanted: selection.to_string(),
    })
}

fn names_of(branches: &Branches, ids: &[BranchId]) -> Vec<String> {
    ids.iter().map(|id| branches[id].record.name.clone()).collect()
}

fn commit_header(branch: &Branch, plan: &Plan) -> Header {
    Header {
        version: VERSION,
        transaction: plan.transaction,
        kind: Kind::Commit { branch: branch.record.id },
        name: branch.record.name.clone(),
        layers: branch.record.layers.clone(),
        stale: Vec::new(),
        veil: None,
        observers: Vec::new(),
        unveiled: Vec::new(),
        lifted: None,
        decided: now(),
        displaced_bytes: plan.displaced_bytes,
    }
}

/// Removes a directory of the store with all that is in it, if it is there.
pub(super) fn remove_tree(path: &Path) -> Result<(), Error> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other.at(path),
    }
}

pub(super) fn too_late(name: &str) -> Error {
    Error::Conflict {
        message: format!("branch {name} cannot be committed: a sibling was committed first"),
        paths: Vec::new(),
        hint: "abort it, and start again from a new branch",
    }
}

fn refuse(name: &str, reason: &str, paths: &BTreeSet<PathBuf>) -> Result<(), Error> {
    if paths.is_empty() {
        return Ok(());
    }
    Err(Error::Conflict {
        message: format!("branch {name} cannot be committed: {reason}"),
        paths: paths.iter().cloned().collect(),
        hint: "the branch is still open: look at these paths, then force the commit or abort it",
    })
}
