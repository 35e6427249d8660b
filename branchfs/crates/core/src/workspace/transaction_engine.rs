//! Transactions on main: a plan is logged in the journal, applied under the gate, and published to all branches.
//!
//! The commit point is the plan in the journal. An error before leaves main as it was; an error while the steps are
//! applied rolls them back. After that the transaction has happened: an error in its last part
//! ([`TransactionEngine::complete`]) stops other transactions ([`crate::fail_stop`]) until the part was repeated, here or
//! by the recovery of a mount.
//!
//! Under the policies snapshot and serializable (S6) a transaction gets a *snapshot layer*, built under the gate from what
//! it moved out of the base. It goes directly above the base into the stack of each branch that was forked before;
//! `layers/<id>/changes` lists what the transaction changed, which later commits of these branches are checked against. An
//! undo of a commit whose snapshot layer is the lowest of a branch removes that layer instead.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLockWriteGuard};

use super::branch_log::Line;
use super::branch_table::{BranchTable, Remainder};
use super::branches::{Branches, descendants, names_of};
use super::partial_commit::count_rest;
use super::store::{SnapshotLayer, Store};
use super::{Branch, BranchId, Committed, Forgotten, HISTORY_BYTES_MAX, MAIN_BRANCH, Policy};
use crate::descriptors::admit_transaction;
use crate::error::{Context, Error};
use crate::fail_stop::FailStop;
use crate::injected_panics::panic_if_listed;
use crate::no_follow;
use crate::ownership;
use crate::rooted_dir::RootedDir;
use crate::transaction::{
    self, EntryHeader, Header, Kind, LoggedTransaction, OwnCtimeChanges, Plan, Prepared,
    TransactionRoots,
};

/// The file with the number of the newest commit that was removed from the history and not undone before.
const PRUNED: &str = "pruned";

/// Journal and history of main.
pub(super) struct TransactionEngine {
    /// Held through each transaction. The background thread takes it, too, to delete objects that are shared with the
    /// base ([`super::ctime_log`]).
    transaction_lock: Arc<Mutex<()>>,
    /// A transaction that was applied and is not complete; locked with `transaction_lock` held.
    pending: Mutex<Option<LoggedTransaction>>,
    /// Says whether transactions are accepted.
    pub(super) fail_stop: Arc<FailStop>,
    /// The base, and the directory with journal and history.
    disk_roots: (OwnedFd, OwnedFd),
    table: Arc<BranchTable>,
    store: Arc<Store>,
}

/// A transaction whose plan is durable in the journal. The table stays locked until it is published.
pub(super) struct Logged<'e> {
    branches: MutexGuard<'e, Branches>,
    decided: LoggedTransaction,
}

/// A transaction that was applied and is not published yet.
pub(super) struct Applied<'e> {
    branches: MutexGuard<'e, Branches>,
    gate: RwLockWriteGuard<'e, ()>,
    decided: LoggedTransaction,
    /// The snapshot layer through which siblings see the earlier base.
    snapshot_layer: Option<SnapshotLayer>,
}

/// The effect of a transaction on main on the live branches.
#[derive(Debug, Default)]
pub(super) struct AffectedBranches {
    /// They are stale with it.
    pub(super) stale: Vec<BranchId>,
    /// Branches that get a snapshot layer.
    pub(super) readers: Vec<BranchId>,
    /// Branches that lose the snapshot layer `dropped_snapshot`.
    pub(super) resumed: Vec<BranchId>,
    pub(super) dropped_snapshot: Option<u64>,
}

/// The live branches that a transaction on main affects, except `but`. `lifted` is the snapshot layer of the
/// transaction that is undone.
pub(super) fn affected_branches(
    branches: &Branches,
    policy: Policy,
    but: Option<BranchId>,
    dropped_snapshot: Option<u64>,
) -> AffectedBranches {
    let mut live = descendants(branches, MAIN_BRANCH);
    live.retain(|id| Some(*id) != but);
    if policy == Policy::FirstWinner {
        return AffectedBranches { stale: live, ..AffectedBranches::default() };
    }
    let knows = |id: &BranchId| {
        dropped_snapshot.is_some()
            && branches[id].record.lower_layers.last().copied() == dropped_snapshot
    };
    let (resumed, readers) = live.into_iter().partition(knows);
    AffectedBranches { stale: Vec::new(), readers, resumed, dropped_snapshot }
}

impl TransactionEngine {
    pub(super) fn new(
        table: Arc<BranchTable>,
        transaction_lock: Arc<Mutex<()>>,
        roots: (OwnedFd, OwnedFd),
    ) -> Self {
        let (fail_stop, store) = (Arc::clone(&table.mount.fail_stop), Arc::clone(&table.store));
        Self {
            transaction_lock,
            pending: Mutex::default(),
            fail_stop,
            disk_roots: roots,
            table,
            store,
        }
    }

    /// Waits until no other transaction is running; none begins while the guard lives.
    pub(super) fn lock_transactions(&self) -> MutexGuard<'_, ()> {
        self.transaction_lock.lock().unwrap_or_else(PoisonError::into_inner) // it guards nothing that could be half-done
    }

    /// Adds an applied transaction to the history. Undone commits are removed first, because a new commit ends their redo;
    /// then entries above the limits, which are returned. `oldest` is the fork time of the oldest live branch.
    pub(super) fn add_to_history(
        &self,
        disk: &TransactionRoots,
        decided: &LoggedTransaction,
        oldest: Option<i64>,
    ) -> Result<Vec<Forgotten>, Error> {
        let header = &decided.header;
        let is_commit = matches!(header.kind, Kind::Commit { .. });
        if is_commit {
            let (mut undone, kept): (Vec<_>, Vec<_>) =
                transaction::outline(disk)?.into_iter().partition(|past| past.undone.is_some());
            undone.reverse(); // the last one first: where this stops half-way, the rest is still a stack
            let oldest = oldest.map_or(header.decided, |oldest| oldest.min(header.decided));
            self.drop_from_history(&undone, &kept, Some(oldest))?;
        }
        decided.finish(disk, &self.store.trash_name("tx", header.transaction))?;
        if !is_commit {
            return Ok(Vec::new());
        }
        Ok(self.trim(disk, header.transaction, oldest).unwrap_or_else(|error| {
            // The transaction is complete; the next commit does it.
            tracing::warn!("commits over the limits of the history stay: {error}");
            Vec::new()
        }))
    }

    /// Drops the oldest commits that are over the limits. Returns those that were there before the commit `newest`.
    fn trim(
        &self,
        disk: &TransactionRoots,
        newest: u64,
        oldest: Option<i64>,
    ) -> Result<Vec<Forgotten>, Error> {
        let mut gone = transaction::outline(disk)?;
        let sizes: Vec<u64> = gone.iter().map(|past| past.header.displaced_bytes).collect();
        let kept = gone.split_off(self.count_over_limits(&sizes));
        self.drop_from_history(&gone, &kept, oldest)?;
        Ok(forgotten(gone.iter().filter(|past| past.header.transaction != newest)))
    }

    /// The commits that a commit by this plan would push out of the history.
    pub(super) fn forgotten_by(&self, plan: &Plan) -> Result<Vec<Forgotten>, Error> {
        if plan.changes_nothing() {
            return Ok(Vec::new());
        }
        let mut kept = transaction::outline(&self.disk()?)?;
        kept.retain(|past| past.undone.is_none());
        Ok(forgotten(kept.iter().take(self.count_over_limits_with(plan, &kept))))
    }

    /// Whether a commit by this plan drops commits from the history: undone ones, or those over the limits.
    pub(super) fn drops_history(&self, plan: &Plan) -> Result<bool, Error> {
        let past = transaction::outline(&self.disk()?)?;
        Ok(past.iter().any(|past| past.undone.is_some())
            || self.count_over_limits_with(plan, &past) > 0)
    }

    /// How many of the oldest commits are over the limits once the plan's is in the history, too.
    fn count_over_limits_with(&self, plan: &Plan, kept: &[EntryHeader]) -> usize {
        let sizes = kept.iter().map(|past| past.header.displaced_bytes);
        let sizes: Vec<u64> = sizes.chain([plan.displaced_bytes]).collect();
        self.count_over_limits(&sizes).min(kept.len())
    }

    /// How many of the oldest commits are over the limits of the history, given the bytes that each keeps on disk, oldest
    /// first. The newest is within them whatever its size, unless no history is wanted.
    fn count_over_limits(&self, sizes: &[u64]) -> usize {
        let mut bytes = 0;
        let fits = |size: &&u64| {
            bytes += **size;
            bytes <= HISTORY_BYTES_MAX
        };
        let count = sizes.iter().rev().take_while(fits).count();
        sizes.len() - count.max(1).min(self.store.settings.history_commits_max).min(sizes.len())
    }

    /// Moves commits out of the history; `kept` are those that stay.
    pub(super) fn drop_from_history(
        &self,
        gone: &[EntryHeader],
        kept: &[EntryHeader],
        oldest_fork: Option<i64>,
    ) -> Result<(), Error> {
        self.store.ctime_log.record_forgotten(gone, kept, oldest_fork)?;
        let done = gone.iter().filter(|past| past.undone.is_none());
        if let Some(newest) = done.map(|past| past.header.transaction).max() {
            let path = self.store.base_store_path.join(PRUNED);
            let draft = path.with_extension("new");
            no_follow::write(&draft, format!("{newest}\n").as_bytes()).at(&draft)?;
            ownership::set(&draft, self.store.owner).at(&draft)?;
            no_follow::rename(&draft, &path).at(&path)?;
        }
        for past in gone {
            let from = self.store.base_store_path.join(&past.directory);
            let to = self
                .store
                .base_store_path
                .join(self.store.trash_name("past", past.header.transaction));
            no_follow::rename(&from, &to).at(&from)?;
        }
        Ok(())
    }

    /// The number of the newest commit that was removed from the history and not undone before; 0 if there is none.
    pub(super) fn newest_pruned(&self) -> Result<u64, Error> {
        let path = self.store.base_store_path.join(PRUNED);
        match no_follow::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(0),
            content => Ok(String::from_utf8_lossy(&content.at(&path)?).trim().parse().unwrap_or(0)),
        }
    }

    pub(super) fn own_changes(&self, disk: &TransactionRoots) -> Result<OwnCtimeChanges, Error> {
        with_history(disk, self.store.ctime_log.noted()?)
    }

    /// The own changes of ctimes, for the rebase of a branch. For a stale branch only those of transactions that are
    /// still in the history: the paths that dropped transactions changed are unknown, and only ctimes are left.
    pub(super) fn traces_since(&self, branch: &Branch) -> Result<OwnCtimeChanges, Error> {
        let own_changes = match branch.record.is_stale {
            true => self.deleted_links()?,
            false => self.store.ctime_log.noted()?,
        };
        with_history(&self.disk()?, own_changes)
    }

    /// The own changes of ctimes without those of transactions.
    pub(super) fn deleted_links(&self) -> Result<OwnCtimeChanges, Error> {
        let mut own_changes = self.store.ctime_log.noted()?;
        own_changes.drop_transactions();
        Ok(own_changes)
    }

    /// Waits for a running transaction, and completes the last one if its last part failed. No other transaction starts
    /// while the guard exists.
    ///
    /// # Errors
    /// `Stopped`; `Unsupported` if the daemon cannot open the files that a transaction needs.
    pub(super) fn begin_transaction(&self) -> Result<MutexGuard<'_, ()>, Error> {
        let transaction_lock = self.lock_transactions();
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(decided) = pending.take() {
            let completed = self.disk().and_then(|disk| self.complete(&disk, &decided));
            match completed {
                Ok(_) => self.fail_stop.complete(),
                Err(error) => self.stop(decided, &error, &mut pending),
            }
        }
        self.fail_stop.check()?;
        admit_transaction()?;
        Ok(transaction_lock)
    }

    /// As [`Self::begin_transaction`], for a change of the store that does not exclude transactions. The caller checks
    /// once more after it has locked the table.
    ///
    /// # Errors
    /// `Stopped`.
    pub(super) fn admit_change(&self) -> Result<(), Error> {
        match self.fail_stop.check() {
            Ok(()) => Ok(()),
            Err(_) => self.begin_transaction().map(drop),
        }
    }

    /// Stops transactions because the last part of `decided` failed with `error`. That part is repeated unless a sync
    /// failed: a later successful sync does not prove that earlier writes are on disk.
    fn stop(
        &self,
        decided: LoggedTransaction,
        error: &Error,
        pending: &mut Option<LoggedTransaction>,
    ) {
        let what = decided.header.kind.word();
        let reason = format!("the {what} was applied, but completing it failed: {error}");
        if matches!(error, Error::NotDurable { .. }) {
            self.fail_stop.trip(reason);
        } else {
            self.fail_stop.hold_for_pending(reason);
            *pending = Some(decided);
        }
    }

    /// Makes a plan durable in the journal: the commit point. `address` makes its header when it is about to happen. The
    /// table of branches is locked from there on; not before, while the file system syncs.
    ///
    /// # Errors
    /// `InDoubt`, with which transactions are stopped. After any other error main is as before.
    pub(super) fn log(
        &self,
        disk: &TransactionRoots,
        plan: Plan,
        address: impl FnOnce(&Branches) -> Result<Header, Error>,
    ) -> Result<Logged<'_>, Error> {
        let number = plan.transaction;
        self.refuse_unfinished(disk)?;
        panic_if_listed("transaction-planned");
        let prepared =
            Prepared::new(disk, plan).inspect_err(|_| self.store.drop_journal(number))?;
        panic_if_listed("transaction-prepared");
        let branches = self.table.lock();
        panic_if_listed("transaction-locked");
        let header = address(&branches).inspect_err(|_| self.store.drop_journal(number))?;
        // What fails here may have left a plan that the next mount would carry out.
        let decided = prepared.log(disk, header).map_err(|error| {
            let discarded =
                transaction::discard(disk, number, &self.store.trash_name("failed", number));
            self.after_rollback(error, discarded)
        })?;
        panic_if_listed("transaction-decided");
        Ok(Logged { branches, decided })
    }

    /// Applies a logged transaction under the gate. An error rolls its steps back.
    ///
    /// # Errors
    /// `InDoubt`, which also stops transactions. After any other error main is as before.
    pub(super) fn apply<'e>(
        &'e self,
        disk: &TransactionRoots,
        Logged { branches, decided }: Logged<'e>,
    ) -> Result<Applied<'e>, Error> {
        let gate = self.table.mount.block_requests();
        match self.apply_steps(disk, &decided) {
            Ok(snapshot_layer) => Ok(Applied { branches, gate, decided, snapshot_layer }),
            Err(error) => {
                drop(gate);
                if !error.is_as_before() {
                    self.fail_stop.trip(error.to_string());
                    return Err(error);
                }
                // Without this record a later undo may be refused without need.
                let _ = self.store.ctime_log.record_rollback(disk, &decided);
                let trash = self.store.trash_name("failed", decided.header.transaction);
                let discarded = decided.discard(disk, &trash);
                Err(self.after_rollback(error, discarded))
            }
        }
    }

    /// The error of a transaction that was rolled back after `failed`, and whose journal entry was `discarded` or not.
    /// The next mount would act on an entry that is left.
    fn after_rollback(&self, failed: Error, discarded: Result<(), Error>) -> Error {
        match discarded {
            Ok(()) => {
                self.store.empty_trash(); // where the disk was full, the next try needs the room
                failed
            }
            Err(rollback) => {
                let error =
                    Error::InDoubt { failed: Box::new(failed), rollback: Box::new(rollback) };
                self.fail_stop.trip(error.to_string());
                error
            }
        }
    }

    /// Refuses a transaction while an earlier one is in the journal: recovery would apply it after this one.
    fn refuse_unfinished(&self, disk: &TransactionRoots) -> Result<(), Error> {
        if let Some(decided) = transaction::unfinished(disk)?.first() {
            let (what, number) = (decided.header.kind.word(), decided.header.transaction);
            self.fail_stop.trip(format!("the journal holds the unfinished {what} {number}"));
        }
        self.fail_stop.check()
    }

    /// Makes a transaction that was applied visible, makes it durable, and moves it into the history. A committed branch goes
    /// on with `rest`, or ends.
    ///
    /// # Errors
    /// `Incomplete`, with which transactions are stopped.
    pub(super) fn publish(
        &self,
        disk: &TransactionRoots,
        applied: Applied<'_>,
        rest: Option<Remainder>,
    ) -> Result<Committed, Error> {
        let Applied { mut branches, gate, decided, snapshot_layer } = applied;
        let what = match decided.header.kind {
            Kind::Commit { .. } => "committed",
            Kind::Undo { .. } => "undone: the commit of",
            Kind::Redo { .. } => "redone: the commit of",
        };
        let count = decided.changes.len();
        tracing::info!("{what} {:?}, {count} paths changed", decided.header.name);
        for layer in [&self.store.base, &self.table.main_layer()] {
            layer.tree.invalidate(Path::new(""));
        }
        let header = decided.header.clone();
        let changes = decided.changes.clone();
        self.table.mark_stale(&mut branches, &header.stale);
        self.table.insert_snapshot_layer(&mut branches, &header, snapshot_layer.as_ref());
        let mut continued = None;
        if let (Kind::Commit { branch }, Some(rest)) = (header.kind, rest) {
            continued = self.table.continue_with_rest(&mut branches, branch, rest);
        }
        panic_if_listed("transaction-visible");
        drop(gate);
        let stale = names_of(&branches, &header.stale);
        match header.kind {
            Kind::Commit { branch } if header.rest.is_none() => {
                self.table.remove_committed(&mut branches, branch);
            }
            _ => {}
        }
        drop(branches);
        let remaining = continued.as_ref().map_or(0, |continued| count_rest(&continued.branch));
        let completed = self.complete(disk, &decided);
        if let Err(error) = &completed {
            let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
            self.stop(decided, error, &mut pending);
        }
        if let Some(outdated) = continued.and_then(|continued| continued.outdated) {
            self.table.invalidate_kernel_cache(outdated);
        }
        self.table.notify_stale(&self.table.lock(), &header.stale);
        self.table.mount.invalidate_main();
        self.store.empty_trash();
        match completed {
            Ok(forgotten) => {
                let has_entry = self.store.settings.history_commits_max > 0; // its size does not matter
                let number = has_entry.then_some(header.transaction);
                Ok(Committed { stale, changes, remaining, forgotten, number })
            }
            Err(error) => {
                Err(Error::Incomplete { what: header.kind.word(), source: Box::new(error) })
            }
        }
    }

    /// The last part of a transaction that was applied. Can be repeated: the journal entry becomes history at its end.
    fn complete(
        &self,
        disk: &TransactionRoots,
        decided: &LoggedTransaction,
    ) -> Result<Vec<Forgotten>, Error> {
        let header = &decided.header;
        self.store.release_layers(decided)?;
        let branches = self.table.lock();
        let line =
            |id| branches.get(&id).map_or(Line::Deleted { layer: id }, |one| Line::of(&one.record));
        let committed = match header.kind {
            Kind::Commit { branch } => Some(line(branch)),
            Kind::Undo { .. } | Kind::Redo { .. } => None,
        };
        let concerned = header.stale.iter().chain(&header.readers).chain(&header.resumed);
        let concerned = concerned.filter_map(|id| branches.get(id));
        let lines = committed.into_iter().chain(concerned.map(|branch| Line::of(&branch.record)));
        self.store.records.append(&lines.collect::<Vec<_>>())?;
        panic_if_listed("transaction-recorded");
        drop(branches);
        // Together with the base, where they are on one file system. The journal entry stays until then.
        LoggedTransaction::sync(disk)?;
        if self.store.is_external() {
            self.store.records.sync()?;
        }
        panic_if_listed("transaction-synced");
        self.store.drop_snapshot(&self.table.lock(), header)?;
        let forgotten = self.add_to_history(disk, decided, self.table.oldest_fork())?;
        panic_if_listed("transaction-kept");
        Ok(forgotten)
    }

    /// Under the gate: executes the steps and builds the snapshot layer. An error rolls all of it back.
    fn apply_steps(
        &self,
        disk: &TransactionRoots,
        decided: &LoggedTransaction,
    ) -> Result<Option<SnapshotLayer>, Error> {
        decided.apply(disk)?;
        panic_if_listed("transaction-applied");
        let Some(id) = decided.header.snapshot_layer else { return Ok(None) };
        self.store.build_snapshot_layer(disk, decided, id).map(Some).map_err(|error| {
            self.store.move_to_trash(&self.store.base_store_layer_path(id), "veil");
            decided.rollback_all(disk, error)
        })
    }

    /// Enters the audience into a transaction's header.
    pub(super) fn set_affected(&self, header: Header, affected: AffectedBranches) -> Header {
        let snapshot_layer = (!affected.readers.is_empty()).then(|| self.store.next_number());
        Header {
            stale: affected.stale,
            readers: affected.readers,
            snapshot_layer,
            dropped_snapshot: affected.dropped_snapshot.filter(|_| !affected.resumed.is_empty()),
            resumed: affected.resumed,
            ..header
        }
    }

    pub(super) fn disk(&self) -> Result<TransactionRoots, Error> {
        let duplicate =
            |root: &OwnedFd| rustix::io::dup(root).map(RootedDir::new).at(&self.store.base_path);
        Ok(TransactionRoots {
            base: duplicate(&self.disk_roots.0)?,
            store: duplicate(&self.disk_roots.1)?,
        })
    }
}

/// Adds the transactions that the history has.
fn with_history(
    disk: &TransactionRoots,
    mut own_changes: OwnCtimeChanges,
) -> Result<OwnCtimeChanges, Error> {
    for past in transaction::outline(disk)? {
        [Some(past.done), past.undone].into_iter().flatten().for_each(|one| own_changes.add(one));
    }
    Ok(own_changes)
}

fn forgotten<'o>(gone: impl Iterator<Item = &'o EntryHeader>) -> Vec<Forgotten> {
    let forgotten = |past: &EntryHeader| Forgotten {
        id: past.header.transaction,
        branch: past.header.name.clone(),
    };
    gone.map(forgotten).collect()
}
