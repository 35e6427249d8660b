//! Veils: what keeps a branch's snapshot while others commit to main (S6).
//!
//! A transaction that leaves other branches alive gets a layer, woven under the gate from what it moved out of the base,
//! which goes right above the base into the stack of everybody who was forked before. `layers/<veil>/changes` tells what
//! the transaction changed: that is what a commit of theirs is compared with. An undo of a commit whose veil is the
//! lowest of a branch takes that veil away instead: the base is what the branch knows.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::branches::Branches;
use super::conflicts::Theirs;
use super::store::{give, write_private};
use super::{BranchId, MAIN_BRANCH, Policy, Record, Workspace, below};
use crate::commit::{self, Change, Decided, Disk, Header, Woven};
use crate::error::{Context, Error};
use crate::layer::{Layer, LayerId};
use crate::no_follow;
use crate::seen::{Read, ReadSet};
use crate::tree::remove_path;

/// The layer that a transaction has made, and where a view changes with it.
pub(super) type Veil = (Arc<Layer>, Arc<Woven>);

/// What a transaction on main means to the branches that are open.
#[derive(Debug, Default)]
pub(super) struct Audience {
    /// They are stale with it.
    pub(super) stale: Vec<BranchId>,
    /// They get a veil.
    pub(super) observers: Vec<BranchId>,
    /// They lose the veil `lifted`.
    pub(super) unveiled: Vec<BranchId>,
    pub(super) lifted: Option<u64>,
}

impl Workspace {
    /// Who looks at main, but for the branch `but`; `lifted` is the veil of the transaction that is taken back.
    pub(super) fn audience(
        &self,
        branches: &Branches,
        policy: Policy,
        but: Option<BranchId>,
        lifted: Option<u64>,
    ) -> Audience {
        let mut live = below(branches, MAIN_BRANCH);
        live.retain(|id| Some(*id) != but);
        if policy == Policy::FirstWinner {
            return Audience { stale: live, ..Audience::default() };
        }
        let knows =
            |id: &BranchId| lifted.is_some() && branches[id].record.below.last().copied() == lifted;
        let (unveiled, observers) = live.into_iter().partition(knows);
        Audience { stale: Vec::new(), observers, unveiled, lifted }
    }

    /// Enters the audience into a transaction's header.
    pub(super) fn address(&self, header: Header, audience: Audience) -> Header {
        let veil = (!audience.observers.is_empty()).then(|| self.next_number());
        Header {
            stale: audience.stale,
            observers: audience.observers,
            veil,
            lifted: audience.lifted.filter(|_| !audience.unveiled.is_empty()),
            unveiled: audience.unveiled,
            ..header
        }
    }

    /// Makes the layer `id` the veil over a transaction that has been carried out. What a crash left of it goes first.
    pub(super) fn weave(&self, disk: &Disk, decided: &Decided, id: u64) -> Result<Veil, Error> {
        let path = self.home_layer_path(id);
        remove_path(&path).at(&path)?;
        for directory in ["", "upper"] {
            self.make_directory(&path.join(directory))?;
        }
        let layer = Layer::open_veil(LayerId(id), &path, self.namespace)?;
        let woven = commit::weave(disk, decided, &layer)?;
        let changes = path.join("changes");
        let text = serde_json::to_vec(&decided.changes)
            .map_err(|error| Error::Corrupt(error.to_string()))?;
        write_private(&changes, &text)?;
        give(&changes, self.owner)?;
        Ok((Arc::new(layer), Arc::new(woven)))
    }

    /// Under the gate: everybody forked before goes on seeing what was.
    pub(super) fn veil(&self, branches: &mut Branches, header: &Header, veil: Option<&Veil>) {
        for id in &header.observers {
            let (Some(branch), Some((layer, woven))) = (branches.get_mut(id), veil) else {
                continue;
            };
            branch.record.below.push(layer.id.0);
            let lowest = branch.stack.len() - 1;
            branch.stack.insert(lowest, Arc::clone(layer));
            if let Ok(mounted) = self.filesystem.mounted(branch.slot) {
                mounted.lock_as_it_is().restack_later(branch.stack.clone(), Some(woven));
            }
        }
        for id in &header.unveiled {
            let (Some(branch), Some(lifted)) = (branches.get_mut(id), header.lifted) else {
                continue;
            };
            branch.record.below.retain(|layer| *layer != lifted);
            branch.stack.retain(|layer| layer.id.0 != lifted);
            if let Ok(mounted) = self.filesystem.mounted(branch.slot) {
                mounted.lock_as_it_is().restack_later(branch.stack.clone(), None);
            }
        }
    }

    /// The same for the records alone, after a crash.
    pub(super) fn veil_records(
        &self,
        records: &mut BTreeMap<BranchId, Record>,
        disk: &Disk,
        decided: &Decided,
    ) -> Result<(), Error> {
        let header = &decided.header;
        if let Some(veil) = header.veil {
            self.weave(disk, decided, veil)?;
            for id in &header.observers {
                if let Some(record) = records.get_mut(id).filter(|one| !one.below.contains(&veil)) {
                    record.below.push(veil);
                }
            }
        }
        for id in &header.unveiled {
            if let Some(record) = records.get_mut(id) {
                record.below.retain(|layer| Some(*layer) != header.lifted);
            }
        }
        Ok(())
    }

    /// A veil that nobody looks through any more goes at once: it shares objects with the base, whose count of links is
    /// right only then.
    pub(super) fn drop_lifted(&self, branches: &Branches, header: &Header) -> Result<(), Error> {
        let Some(lifted) = header.lifted else { return Ok(()) };
        if branches.values().any(|branch| branch.record.below.contains(&lifted)) {
            return Ok(());
        }
        let path = self.home_layer_path(lifted);
        remove_path(&path).at(&path)
    }

    /// The veils in a branch's stack, top first: directories in the store.
    pub(super) fn veils_of(&self, record: &Record) -> Vec<PathBuf> {
        let is_veil = |layer: &&u64| {
            no_follow::exists(&self.home_layer_path(**layer).join("changes")).unwrap_or(false)
        };
        let upper = |layer: &u64| Path::new("layers").join(layer.to_string()).join("upper");
        record.below.iter().filter(is_veil).map(upper).collect()
    }

    /// What others committed to main since a branch was forked.
    pub(super) fn theirs(&self, record: &Record) -> Result<Theirs, Error> {
        let mut theirs = Theirs::default();
        for layer in &record.below {
            let path = self.home_layer_path(*layer).join("changes");
            let text = match no_follow::read(&path) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue, // no veil
                other => other.at(&path)?,
            };
            let changes: Vec<Change> = serde_json::from_slice(&text)
                .map_err(|error| Error::Corrupt(format!("{}: {error}", path.display())))?;
            theirs.add(&changes);
        }
        Ok(theirs)
    }

    /// What a branch read of its snapshot.
    pub(super) fn reads(&self, record: &Record) -> Result<Vec<(PathBuf, Read)>, Error> {
        let mut reads = Vec::new();
        for layer in &record.layers {
            let path = self.layer_path(*layer).join("reads");
            if !no_follow::exists(&path).at(&path)? {
                return Err(Error::Unsupported(format!(
                    "what branch {} read was not recorded: mount with the policy serializable before it is forked",
                    record.name
                )));
            }
            reads.extend(ReadSet::load(&path).at(&path)?);
        }
        Ok(reads)
    }
}
