//! The plan of a commit into main, and all that can stand against it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use rustix::fs::FileType;

#[cfg(test)]
use super::Selector;
use super::commit_into_branch::Work;
use super::{Branch, CommitOptions, Policy, Record, Workspace, now};
#[cfg(test)]
use crate::commit::Disk;
use crate::commit::{
    self, Change, Header, Kept, Kind, Metadata, Place, Plan, Request, Traces, VERSION,
    VERSION_WITH_REST,
};
use crate::error::{Context, Error};
use crate::seen::WriteSet;
use crate::selection::Selection;
use crate::view::HIDDEN;

pub(super) const WRITTEN_BY_OTHERS: &str =
    "others committed changes of the same paths since the fork";
pub(super) const CHANGED_AFTER_READ: &str =
    "others committed changes of what it read since the fork";

impl Workspace {
    pub(super) fn policy(&self, options: &CommitOptions) -> Policy {
        options.policy.unwrap_or(self.settings.policy)
    }

    /// The plan of a commit into main that nothing stands against, or that is forced.
    pub(super) fn checked_plan(
        &self,
        branch: &Branch,
        options: &CommitOptions,
    ) -> Result<Plan, Error> {
        let record = &branch.record;
        let theirs = self.theirs(record)?;
        let policy = self.policy(options);
        let reads = match policy {
            Policy::Serializable => self.reads(record)?,
            Policy::FirstWinner | Policy::Snapshot => Vec::new(),
        };
        if !theirs.is_empty() && !options.force && Work::of(branch)?.is_empty()? {
            return Ok(Plan::default());
        }
        if policy == Policy::FirstWinner && !theirs.is_empty() && !options.force && !options.rebase
        {
            return Err(too_late(&record.name));
        }
        let mut selection = options.selection.clone();
        loop {
            let plan = self.plan(branch, selection.clone(), options.drop_rest)?;
            refuse_nothing_chosen(branch, &plan, &selection)?;
            self.refuse_other_stores(&plan)?;
            if options.force {
                return self.with_visible_part(record, plan);
            }
            let written = theirs.against(&plan.changes, &plan.written);
            if options.skip && selection.skip(written.iter().chain(&plan.drift).cloned()) {
                continue; // each turn leaves out more, so there are no more turns than paths
            }
            let name = &record.name;
            refuse(name, WRITTEN_BY_OTHERS, &written)?;
            refuse(name, CHANGED_AFTER_READ, &theirs.against_reads(&reads))?;
            refuse(name, "the base was changed by others since the fork", &plan.drift)?;
            return self.with_visible_part(record, plan);
        }
    }

    /// A branch that keeps a part goes on looking through its snapshot layers, which must not hide what was committed.
    fn with_visible_part(&self, record: &Record, plan: Plan) -> Result<Plan, Error> {
        if plan.rest.is_empty() {
            return Ok(plan);
        }
        let (disk, veils) = (self.disk()?, self.veils_of(record));
        let hides = |path: &Path| {
            for veil in &veils {
                let place = Place::Store(veil.join(path));
                let Some(stat) = disk.stat(&place)? else { continue };
                let is_directory =
                    FileType::from_raw_mode(u32::from(stat.stx_mode)) == FileType::Directory;
                let has = |name: &str| Ok::<bool, Error>(disk.xattr(&place, name)?.is_some());
                if !is_directory || has(self.namespace.opaque())? || has(self.namespace.redirect())?
                {
                    return Ok(true);
                }
            }
            Ok::<bool, Error>(false)
        };
        let mut hidden = Vec::new();
        for Change { path, .. } in &plan.changes {
            let parts: Vec<&Path> =
                path.ancestors().filter(|part| !part.as_os_str().is_empty()).collect();
            for part in parts {
                if hides(part)? {
                    hidden.push(path.clone());
                    break;
                }
            }
        }
        if hidden.is_empty() {
            return Ok(plan);
        }
        Err(Error::Conflict {
            message: format!(
                "branch {} cannot be committed in part: others committed changes of the same paths since the fork, and the branch goes on showing what they replaced",
                record.name
            ),
            paths: hidden,
            hint: "rebase the branch first, or drop the rest of it with --drop-rest",
        })
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

    /// The plan of all that a branch changed, compared with the base as these traces explain it.
    pub(super) fn plan_against(
        &self,
        branch: &Branch,
        traces: Traces,
        attributes_at_fork: BTreeMap<PathBuf, Metadata>,
    ) -> Result<Plan, Error> {
        self.plan_with(branch, (Selection::default(), true), traces, attributes_at_fork)
    }

    fn plan(&self, branch: &Branch, selection: Selection, drops_rest: bool) -> Result<Plan, Error> {
        let traces = self.traces(&self.disk()?)?;
        self.plan_with(branch, (selection, drops_rest), traces, BTreeMap::new())
    }

    fn plan_with(
        &self,
        branch: &Branch,
        (selection, drops_rest): (Selection, bool),
        traces: Traces,
        attributes_at_fork: BTreeMap<PathBuf, Metadata>,
    ) -> Result<Plan, Error> {
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
            by_kernel: self.is_by_kernel(branch)?,
            veils: self.veils_of(&branch.record),
            attributes_at_fork,
            selection,
            drops_rest,
            traces,
            origins,
        };
        commit::plan(&disk, &request)
    }

    /// The plan of a branch's commit, and the header its commit would have.
    #[cfg(test)]
    pub(crate) fn plan_for_tests(
        &self,
        name: &str,
        selection: Selection,
    ) -> Result<(Disk, Header, Plan), Error> {
        let branches = self.lock();
        let branch = Selector::Name(name.to_owned())
            .find(&branches)?
            .ok_or_else(|| Error::NotFound(name.to_owned()))?;
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        mounted.lock().make_layer().at(&self.base_path)?;
        let options = CommitOptions { selection: selection.clone(), ..CommitOptions::default() };
        self.prepare_rest(branch, &options)?;
        mounted.lock().join_all_links().at(&self.base_path)?;
        self.stage(branch.record.id, &branch.record)?.hand_over();
        let plan = self.plan(branch, selection, false)?;
        let rest = self.make_rest(branch, &plan.rest)?.map(|rest| rest.layer.id.0);
        Ok((self.disk()?, commit_header(branch, &plan, rest), plan))
    }
}

/// What is left out because others changed it was given up; a pattern that matches nothing is a mistake.
fn refuse_nothing_chosen(branch: &Branch, plan: &Plan, selection: &Selection) -> Result<(), Error> {
    let takes_any =
        !plan.changes.is_empty() || plan.written.iter().any(|path| selection.takes(path));
    if takes_any || selection.is_all() || selection.skips_any() {
        return Ok(());
    }
    let work = Work::of(branch)?;
    let paths = work.paths();
    let Some(first) = paths.first() else { return Ok(()) };
    Err(Error::NothingChosen {
        name: branch.record.name.clone(),
        count: paths.len(),
        first: first.to_path_buf(),
        wanted: selection.to_string(),
    })
}

pub(super) fn refuse(name: &str, reason: &str, paths: &BTreeSet<PathBuf>) -> Result<(), Error> {
    if paths.is_empty() {
        return Ok(());
    }
    Err(Error::Conflict {
        message: format!("branch {name} cannot be committed: {reason}"),
        paths: paths.iter().cloned().collect(),
        hint: "the branch is still open: look at these paths, then force the commit or abort it",
    })
}

pub(super) fn too_late(name: &str) -> Error {
    Error::Conflict {
        message: format!("branch {name} cannot be committed: a sibling was committed first"),
        paths: Vec::new(),
        hint: "the branch keeps its changes: rebase it onto its parent, or commit it with --rebase",
    }
}

pub(super) fn commit_header(branch: &Branch, plan: &Plan, rest: Option<u64>) -> Header {
    let split = || plan.rest.split.iter().copied().collect();
    let rest = rest.map(|layer| Kept { layer, split: split() });
    let kind = Kind::Commit { branch: branch.record.id };
    Header {
        version: if rest.is_some() { VERSION_WITH_REST } else { VERSION },
        rest,
        layers: branch.record.layers.clone(),
        displaced_bytes: plan.displaced_bytes,
        ..header(plan.transaction, kind, branch.record.name.clone())
    }
}

/// Of a transaction that is decided now, takes no layer, and concerns nobody yet.
pub(super) fn header(transaction: u64, kind: Kind, name: String) -> Header {
    Header {
        version: VERSION,
        transaction,
        kind,
        name,
        layers: Vec::new(),
        rest: None,
        stale: Vec::new(),
        veil: None,
        observers: Vec::new(),
        unveiled: Vec::new(),
        lifted: None,
        decided: now(),
        displaced_bytes: 0,
    }
}
