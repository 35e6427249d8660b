//! The verbs `export` and `import`: a branch as an archive, through a descriptor that comes with the request.

use std::fs::File;
use std::io::{BufWriter, Write};

use serde_json::{Value, json};

use super::connection::Connection;
use super::{Request, branch_of, selector};
use crate::archive::{self, Rights};
use crate::difference::{Moves, Reader};
use crate::error::{Context, Error};
use crate::workspace::{BranchInfo, Selector, Workspace};

/// Answers `export`. Content is read with the rights of who asks.
pub(super) fn export(
    request: &Request,
    workspace: &Workspace,
    connection: &mut Connection<'_>,
) -> Result<Value, Error> {
    const BUFFER_BYTES: usize = 1 << 20;
    let output = File::from(connection.descriptor("to write the archive to")?);
    let pairs = workspace.compare(&branch_of(request.branch.as_ref())?, Moves::Listed)?;
    connection.peer.act(|| {
        let mut output = BufWriter::with_capacity(BUFFER_BYTES, output);
        archive::export(pairs, &mut Reader::default(), &mut output)?;
        output.flush().at("the output")?;
        Ok(json!({}))
    })
}

/// Answers `import`: the branch, and whether the archive says what it was made against. The archive makes no file that who
/// asks could not make.
pub(super) fn import(
    request: &Request,
    workspace: &Workspace,
    connection: &mut Connection<'_>,
) -> Result<(BranchInfo, bool), Error> {
    let input = File::from(connection.descriptor("to read the archive from")?);
    let name = request.name.as_deref();
    let name = name.ok_or_else(|| Error::Usage("import needs a name".to_owned()))?;
    let parent = request.parent.as_ref().map_or(Ok(Selector::Id(0)), selector)?;
    let peer = &connection.peer;
    let rights = match (request.no_same_owner, peer.is_equal()) {
        (true, true) => Rights::Given(workspace.owner().0, workspace.owner().1),
        (true, false) => Rights::Given(peer.ids().0, peer.ids().1),
        (false, true) => Rights::All,
        (false, false) => Rights::Of(peer),
    };
    workspace.import(name, &parent, input, &rights, request.force)
}
