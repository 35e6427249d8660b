//! `branchfs fsck`: checks a store that is not mounted. The exit codes are those of fsck(8).

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

#[derive(Args)]
pub(crate) struct Fsck {
    /// Put right what can be put right without losing anything
    #[arg(long)]
    repair: bool,
    /// The store, or the base that it is in
    path: PathBuf,
}

/// The result of the check.
enum Outcome {
    Clean,
    /// All damages were repaired.
    Corrected,
    /// Some damages were not repaired.
    Uncorrected,
    /// The store could not be checked.
    Failed,
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> Self {
        Self::from(match outcome {
            Outcome::Clean => 0,
            Outcome::Corrected => 1,
            Outcome::Uncorrected => 4,
            Outcome::Failed => 8,
        })
    }
}

pub(crate) fn fsck(arguments: &Fsck) -> ExitCode {
    let damages = match branchfs::check(&arguments.path, arguments.repair) {
        Ok(damages) => damages,
        Err(error) => {
            eprintln!("branchfs: {error}");
            return Outcome::Failed.into();
        }
    };
    for damage in &damages {
        let state = if damage.is_repaired { "repaired" } else { "damaged" };
        println!("{state}\t{}\t{}", damage.path.display(), damage.what);
    }
    let left = damages.iter().filter(|damage| !damage.is_repaired).count();
    match (damages.len(), left) {
        (0, _) => Outcome::Clean,
        (_, 0) => Outcome::Corrected,
        _ => Outcome::Uncorrected,
    }
    .into()
}
