//! The plan of a commit into main, and all that can stand against it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use rustix::fs::FileType;

use super::change_set::ChangeSet;
use super::commit_options::{CommitOptions, policy};
use super::driver_sync::seen_by_kernel;
use super::{Branch, Policy, Record, Workspace, now};
use crate::error::{Context, Error};
use crate::path_filter::PathFilter;
use crate::transaction::{
    self, Change, Header, Kept, Kind, Location, Metadata, OwnCtimeChanges, Plan, Request, VERSION,
    VERSION_WITH_REST,
};
use crate::view::HIDDEN;
use crate::write_set::WriteSet;

pub(super) const WRITTEN_BY_OTHERS: &str = "another commit since the fork changed the same paths";
pub(super) const CHANGED_AFTER_READ: &str =
    "another commit since the fork changed files that it read";

/// The plan of a commit into main, after all checks; conflicts are allowed if it is forced.
pub(super) fn validated_plan(
    workspace: &Workspace,
    branch: &Branch,
    options: &CommitOptions,
) -> Result<Plan, Error> {
    let record = &branch.record;
    let theirs = workspace.store.committed_changes_of(record)?;
    let policy = policy(workspace, options);
    let reads = match policy {
        Policy::Serializable => workspace.store.reads(record)?,
        Policy::FirstWinner | Policy::Snapshot => Vec::new(),
    };
    if !theirs.is_empty() && !options.force && ChangeSet::of(branch)?.is_empty()? {
        return Ok(Plan::default());
    }
    if policy == Policy::FirstWinner && !theirs.is_empty() && !options.force && !options.rebase {
        return Err(sibling_won(&record.name));
    }
    let mut selection = options.selection.clone();
    let created = theirs.created_directories();
    loop {
        let plan = plan(workspace, branch, selection.clone(), options.drop_rest, &created)?;
        refuse_nothing_chosen(branch, &plan, &selection)?;
        refuse_other_stores(workspace, &plan)?;
        if options.force {
            return with_visible_part(workspace, record, plan);
        }
        let written = theirs.conflicts_with(&plan.changes, &plan.written);
        if options.skip && selection.skip(written.iter().chain(&plan.drift).cloned()) {
            continue; // each turn leaves out more, so there are no more turns than paths
        }
        let name = &record.name;
        refuse_conflicts(name, WRITTEN_BY_OTHERS, &written)?;
        refuse_conflicts(name, CHANGED_AFTER_READ, &theirs.conflicts_with_reads(&reads))?;
        refuse_conflicts(name, "the base was changed directly since the fork", &plan.drift)?;
        return with_visible_part(workspace, record, plan);
    }
}

/// After a partial commit a branch still has its snapshot layers; checks that they do not hide what was committed.
fn with_visible_part(workspace: &Workspace, record: &Record, plan: Plan) -> Result<Plan, Error> {
    if plan.rest.is_empty() {
        return Ok(plan);
    }
    let (disk, snapshot_layers) =
        (workspace.engine.disk()?, workspace.store.snapshot_layers_of(record));
    let hides = |path: &Path| {
        for snapshot_layer in &snapshot_layers {
            let place = Location::Store(snapshot_layer.join(path));
            let Some(stat) = disk.stat(&place)? else { continue };
            let is_directory =
                FileType::from_raw_mode(u32::from(stat.stx_mode)) == FileType::Directory;
            let has = |name: &str| Ok::<bool, Error>(disk.xattr(&place, name)?.is_some());
            if !is_directory
                || has(workspace.store.namespace.opaque())?
                || has(workspace.store.namespace.redirect())?
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
            "branch {} cannot be committed in part: another commit since the fork changed the same \
                paths, and the branch still shows the replaced content",
            record.name
        ),
        paths: hidden,
        hint: "rebase the branch first, or drop the rest of it with --drop-rest",
    })
}

/// Refuses changes in the store of a workspace below the base: in a branch it is a directory like any other, and a
/// changed copy of it would damage the branches of that workspace.
fn refuse_other_stores(workspace: &Workspace, plan: &Plan) -> Result<(), Error> {
    let is_store = |path: &Path| {
        path.file_name() == Some(OsStr::new(HIDDEN))
            && workspace.store.base.tree.stat(&path.join("format")).is_ok()
    };
    let paths = plan.changes.iter().flat_map(|change| [Some(&change.path), change.from.as_ref()]);
    match paths.flatten().flat_map(|path| path.ancestors()).find(|path| is_store(path)) {
        None => Ok(()),
        Some(store) => Err(Error::Unsupported(format!(
            "{} is the store of another workspace, and the branch has changed it: commit with --exclude {HIDDEN}, which leaves it as it is",
            store.display()
        ))),
    }
}

/// Plans all changes of a branch against the base, with these own ctime changes.
pub(super) fn plan_against(
    workspace: &Workspace,
    branch: &Branch,
    own_changes: OwnCtimeChanges,
    attributes_at_fork: BTreeMap<PathBuf, Metadata>,
    created: &BTreeSet<PathBuf>,
) -> Result<Plan, Error> {
    let whole = (PathFilter::default(), true);
    plan_with(workspace, branch, whole, own_changes, attributes_at_fork, created)
}

/// The plan of a commit into main, without its checks.
pub(super) fn plan(
    workspace: &Workspace,
    branch: &Branch,
    selection: PathFilter,
    drops_rest: bool,
    created: &BTreeSet<PathBuf>,
) -> Result<Plan, Error> {
    let own_changes = workspace.engine.own_changes(&workspace.engine.disk()?)?;
    plan_with(workspace, branch, (selection, drops_rest), own_changes, BTreeMap::new(), created)
}

fn plan_with(
    workspace: &Workspace,
    branch: &Branch,
    (selection, drops_rest): (PathFilter, bool),
    own_changes: OwnCtimeChanges,
    attributes_at_fork: BTreeMap<PathBuf, Metadata>,
    created: &BTreeSet<PathBuf>,
) -> Result<Plan, Error> {
    workspace.driver.current().convert(branch.record.id)?;
    let mounted = workspace.table.mounted(branch)?;
    mounted.lock().tree.link_all_copied_up().at(&workspace.store.base_path)?;
    let mut seen = BTreeMap::new();
    let mut origins = HashMap::new();
    for layer in branch.record.layers.iter().rev() {
        let log = workspace.store.layer_path(*layer).join("writes");
        let loaded = WriteSet::load(&log).at(&log)?;
        for (path, expected) in loaded.preconditions {
            seen.entry(path).or_insert(expected);
        }
        if !workspace.store.is_external() {
            origins.extend(loaded.origins); // copies that are staged have other numbers
        }
    }
    let disk = workspace.engine.disk()?;
    seen_by_kernel(workspace, branch, &own_changes, &mut seen)?;
    let layers = branch
        .record
        .layers
        .iter()
        .map(|layer| Path::new("layers").join(layer.to_string()).join("upper"))
        .collect();
    let request = Request {
        transaction: workspace.store.next_number(),
        layers,
        namespace: workspace.store.namespace,
        preconditions: seen,
        forked: branch.record.created,
        by_kernel: workspace.store.is_written_by_overlayfs(branch)?,
        snapshot_layers: workspace.store.snapshot_layers_of(&branch.record),
        attributes_at_fork,
        created_by_others: created.clone(),
        selection,
        drops_rest,
        own_changes,
        origins,
    };
    transaction::plan(&disk, &request)
}

/// Refuses a filter that includes nothing, unless conflicts were skipped: a pattern without a match is a mistake.
fn refuse_nothing_chosen(
    branch: &Branch,
    plan: &Plan,
    selection: &PathFilter,
) -> Result<(), Error> {
    let takes_any =
        !plan.changes.is_empty() || plan.written.iter().any(|path| selection.includes(path));
    if takes_any || selection.is_all() || selection.skips_any() {
        return Ok(());
    }
    let work = ChangeSet::of(branch)?;
    let paths = work.paths();
    let Some(first) = paths.first() else { return Ok(()) };
    Err(Error::NothingChosen {
        name: branch.record.name.clone(),
        count: paths.len(),
        first: first.to_path_buf(),
        wanted: selection.to_string(),
    })
}

pub(super) fn refuse_conflicts(
    name: &str,
    reason: &str,
    paths: &BTreeSet<PathBuf>,
) -> Result<(), Error> {
    if paths.is_empty() {
        return Ok(());
    }
    Err(Error::Conflict {
        message: format!("branch {name} cannot be committed: {reason}"),
        paths: paths.iter().cloned().collect(),
        hint: "the branch is still open: look at these paths, then force the commit or abort it",
    })
}

pub(super) fn sibling_won(name: &str) -> Error {
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

/// The header of a transaction that is logged now, without layers and without affected branches.
pub(super) fn header(transaction: u64, kind: Kind, name: String) -> Header {
    Header {
        version: VERSION,
        transaction,
        kind,
        name,
        layers: Vec::new(),
        rest: None,
        stale: Vec::new(),
        snapshot_layer: None,
        readers: Vec::new(),
        resumed: Vec::new(),
        dropped_snapshot: None,
        decided: now(),
        displaced_bytes: 0,
    }
}
