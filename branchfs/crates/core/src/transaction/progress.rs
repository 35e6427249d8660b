//! How many steps of a transaction have been done, determined from what is on disk.
//!
//! Steps run in order and are rolled back in reverse order, and renames become durable in the order they were made. So the
//! disk holds the state after the first `k` steps, for some `k`, and only `k` has to be found. A single step cannot be
//! judged by its own names: a directory that leaves and comes back is at the same name before its first step and after its
//! last one. Therefore whole states are compared. Each move states what is at its two names before and after it, and the
//! moves in between say at which names the same objects are in any other state. `k` fits if the disk shows all of this.
//!
//! Only the store is reliable: others may change the base at any time, also between a crash and recovery. What the
//! store must have excludes a state if it is missing. What the base must have, and an object in the store that the plan
//! does not know (it replaced one of the base just before it was moved), only counts against a state: the state that
//! the least counts against is the one. Each move has a name in the store, so that edits of the base cannot hide it.
//!
//! Objects are never deleted while a transaction is in the journal, so no inode number in the plan is used again.
//!
//! Cost: four `statx` for each step to find the states that are possible at all, and four for each of those; except in
//! plans made for it there is only one.

use std::collections::{BTreeMap, HashSet};

use super::path_map::PathMap;
use super::step::{Location, Step, TransactionRoots};
use crate::error::Error;

/// The expected object at a location: an inode number, or none.
type Fact<'p> = (&'p Location, Option<u64>);

/// How many steps were done. Steps that set attributes or remove xattrs can be repeated, so they do not count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Progress {
    /// Where to continue: the steps before this one were done.
    pub(super) forward: usize,
    /// Where to begin to roll back: this step and those after it were not done.
    pub(super) back: usize,
}

impl Step {
    /// The objects at the step's two names before it; `None` for a step that moves nothing.
    fn before(&self) -> Option<[Fact<'_>; 2]> {
        match self {
            Self::Rename { from, to, ino, .. } => Some([(from, Some(*ino)), (to, None)]),
            Self::Exchange { one, other, ino_one, ino_other, .. } => {
                Some([(one, Some(*ino_one)), (other, Some(*ino_other))])
            }
            Self::RemoveXattr { .. } | Self::Metadata { .. } => None,
        }
    }

    /// The objects at the step's two names after it.
    fn after(&self) -> Option<[Fact<'_>; 2]> {
        self.before().map(|[(one, at_one), (other, at_other)]| [(one, at_other), (other, at_one)])
    }
}

/// Finds how many steps were done.
///
/// # Errors
/// `Io`; `Corrupt` if the disk shows no state of the transaction, or several different ones.
pub(super) fn progress(disk: &TransactionRoots, steps: &[Step]) -> Result<Progress, Error> {
    let moves: Vec<usize> = (0..steps.len()).filter(|at| steps[*at].before().is_some()).collect();
    let known = known_objects(steps);
    let mut best: Vec<(usize, State)> = Vec::new();
    let mut least = usize::MAX;
    for done in 0..=moves.len() {
        // What can be seen without simulation excludes nearly all.
        let last = done.checked_sub(1).and_then(|last| steps[moves[last]].after());
        let next = moves.get(done).and_then(|next| steps[*next].before());
        let near = last.into_iter().chain(next).flatten();
        if mismatches(disk, near, &known)?.is_none() {
            continue;
        }
        let Some(state) = state(steps, moves.get(done).copied().unwrap_or(steps.len())) else {
            continue;
        };
        let facts = state.iter().map(|(place, object)| (place, *object));
        match mismatches(disk, facts, &known)? {
            Some(count) if count <= least => {
                if count < least {
                    best.clear();
                }
                least = count;
                best.push((done, state));
            }
            _ => {}
        }
    }
    let (Some((first, state)), Some((last, _))) = (best.first(), best.last()) else {
        return Err(Error::Corrupt("the disk shows no state of it".to_owned()));
    };
    let agrees = |(_, other): &(usize, State)| {
        state.iter().all(|(place, object)| other.get(place).is_none_or(|there| there == object))
    };
    // With nothing against them, states that look different are the same one.
    if least > 0 && !best.iter().all(agrees) {
        return Err(Error::Corrupt("the disk shows two different states of it".to_owned()));
    }
    // Of equal states either way takes the one from which all is done that there is to do.
    let forward = first.checked_sub(1).map_or(0, |last| moves[last] + 1);
    let back = moves.get(*last).copied().unwrap_or(steps.len());
    Ok(Progress { forward, back })
}

/// The locations of the objects after some number of steps, as far as the steps name them.
type State = BTreeMap<Location, Option<u64>>;

/// The state after the first `done` steps; `None` if they contradict each other.
fn state(steps: &[Step], done: usize) -> Option<State> {
    let mut state = State::new();
    let mut moves = PathMap::default();
    for step in steps[..done].iter().rev() {
        add(&mut state, step.after(), &moves)?;
        moves.add_reversed(step);
    }
    let mut moves = PathMap::default();
    for step in &steps[done..] {
        add(&mut state, step.before(), &moves)?;
        moves.add(step);
    }
    Some(state)
}

/// Adds the facts of a step, translated by `moves`.
fn add(state: &mut State, facts: Option<[Fact<'_>; 2]>, moves: &PathMap) -> Option<()> {
    for (place, object) in facts.into_iter().flatten() {
        match moves.origin(place) {
            // A later object at the same name came from elsewhere, and is found there.
            Some(now) => drop(state.entry(now).or_insert(object)),
            None if object.is_none() => {}
            None => return None,
        }
    }
    Some(())
}

fn known_objects(steps: &[Step]) -> HashSet<u64> {
    let facts = steps.iter().filter_map(Step::before).flatten();
    facts.filter_map(|(_, object)| object).collect()
}

/// How many facts of this state the disk does not show; `None` if one excludes the state.
fn mismatches<'p>(
    disk: &TransactionRoots,
    facts: impl Iterator<Item = Fact<'p>>,
    known: &HashSet<u64>,
) -> Result<Option<usize>, Error> {
    let mut count = 0;
    for (place, wanted) in facts {
        let found = disk.stat(place)?.map(|stat| stat.stx_ino);
        if found == wanted {
            continue;
        }
        let is_by_others = found.is_some_and(|found| !known.contains(&found));
        if matches!(place, Location::Store(_)) && !is_by_others {
            return Ok(None);
        }
        count += 1;
    }
    Ok(Some(count))
}
