//! The verb `diff`: a list, a list with line counts, or a patch.

use std::fs::File;
use std::io::BufWriter;
use std::io::Write;

use serde_json::{Value, json};

use super::connection::Connection;
use super::{Request, branch_of, path_text};
use crate::difference::{self, Difference, Moves, Reader, Statistics};
use crate::error::{Context, Error};
use crate::workspace::Workspace;

/// Answers `diff`. What is read of content is read with the rights of who asks.
pub(super) fn diff(
    request: &Request,
    workspace: &Workspace,
    connection: &mut Connection<'_>,
) -> Result<Value, Error> {
    let branch = branch_of(request.branch.as_ref())?;
    let moves = if request.patch { Moves::Listed } else { Moves::Whole };
    if !request.patch {
        let pairs = workspace.compare(&branch, moves)?;
        return connection.peer.act(|| {
            let mut reader = Reader::default();
            let differences = difference::compare(pairs, &mut reader)?;
            let changes: Result<Vec<Value>, Error> = differences
                .iter()
                .map(|difference| object(difference, request.stat, &mut reader))
                .collect();
            Ok(json!({ "changes": changes? }))
        });
    }
    let output = File::from(connection.descriptor("to write the patch to")?);
    let pairs = workspace.compare(&branch, moves)?;
    connection.peer.act(|| {
        let mut reader = Reader::default();
        let differences = difference::compare(pairs, &mut reader)?;
        let mut output = BufWriter::new(output);
        let left_out = difference::write_patch(&differences, &mut reader, &mut output)?;
        output.flush().at("the output")?;
        Ok(json!({ "left_out": left_out }))
    })
}

fn object(
    difference: &Difference,
    with_statistics: bool,
    reader: &mut Reader,
) -> Result<Value, Error> {
    let path = difference.path();
    // The workspace itself.
    let path = if path.as_os_str().is_empty() { ".".to_owned() } else { path_text(path) };
    let aspects: Vec<&str> = difference.aspects.iter().map(|aspect| aspect.name()).collect();
    let mut value = json!({
        "path": path,
        "change": difference.change,
        "kind": difference::kind_name(difference.kind()),
    });
    if let Some(from) = difference.from() {
        value["from"] = path_text(from).into();
    }
    if !aspects.is_empty() {
        value["aspects"] = json!(aspects);
    }
    if with_statistics {
        match difference::statistics(difference, reader)? {
            Some(Statistics::Lines { added, removed }) => {
                value["lines"] = json!({ "added": added, "removed": removed });
            }
            Some(Statistics::Bytes { before, after }) => {
                value["bytes"] = json!({ "before": before, "after": after });
            }
            None => {}
        }
    }
    Ok(value)
}
