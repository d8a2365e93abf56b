//! The first words on a link: is this a server that can hold slots?

use deadpool_redis::redis::{Pipeline, Value, aio::MultiplexedConnection, cmd};

use crate::store::{StoreError, scripts};

/// The oldest that knows script flags.
const OLDEST: u32 = 7;

/// What is asked of a server.
#[derive(Debug)]
pub(super) struct Needs {
    /// In front of every key.
    pub(super) prefix: String,
    /// Whether a limit relies on it to lose nothing: one with a strict recovery.
    pub(super) strict: bool,
}

/// What a greeting led to.
#[derive(Debug)]
pub(super) enum Found {
    /// A server that can hold slots, with every script loaded.
    Here(Server),
    /// A node of a Cluster that knows whose the keys are.
    Elsewhere(String, u16),
}

/// A server that can hold slots.
#[derive(Debug)]
pub(super) struct Server {
    /// Changes whenever it starts anew.
    pub(super) run: String,
    /// What isn't right about it, although it will do.
    pub(super) remarks: Vec<String>,
}

impl Server {
    pub(super) async fn greet(
        connection: &mut MultiplexedConnection,
        needs: &Needs,
    ) -> Result<Found, StoreError> {
        let info = Info(cmd("INFO").query_async(connection).await?);
        info.check_version()?;
        if info.fact("cluster_enabled") == Some("1")
            && let Some((host, port)) = owner(connection, &needs.prefix).await?
        {
            return Ok(Found::Elsewhere(host, port));
        }
        let server = info.judge(needs)?;
        let mut pipeline = Pipeline::new();
        scripts::load(&mut pipeline);
        pipeline.exec_async(connection).await?;
        Ok(Found::Here(server))
    }
}

/// The node of a Cluster that has the keys with this prefix, if it isn't the one that is asked.
async fn owner(
    connection: &mut MultiplexedConnection,
    prefix: &str,
) -> Result<Option<(String, u16)>, StoreError> {
    let tag = prefix.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
    if tag.is_none_or(|(tag, _)| tag.is_empty()) {
        return Err(StoreError::Unfit(
            "the server is in cluster mode, so store.prefix must be a hash tag, such as \"{tidegate}:\": \
             it keeps all keys on one node"
                .to_owned(),
        ));
    }
    let mut pipeline = Pipeline::new();
    pipeline.cmd("CLUSTER").arg("MYID");
    pipeline.cmd("CLUSTER").arg("KEYSLOT").arg(prefix);
    let (me, slot): (String, i64) = pipeline.query_async(connection).await?;
    let ranges: Vec<Value> = cmd("CLUSTER").arg("SLOTS").query_async(connection).await?;
    let nodes = ranges.iter().filter_map(|range| match range {
        Value::Array(range) => match &range[..] {
            [Value::Int(first), Value::Int(last), Value::Array(node), ..]
                if (*first..=*last).contains(&slot) =>
            {
                Some(node)
            }
            _ => None,
        },
        _ => None,
    });
    for node in nodes {
        if let [Value::BulkString(host), Value::Int(port), Value::BulkString(id), ..] = &node[..]
            && let (Ok(host), Ok(port)) = (str::from_utf8(host), u16::try_from(*port))
        {
            return Ok((*id != me.as_bytes()).then(|| (host.to_owned(), port)));
        }
    }
    Err(StoreError::Unavailable("no node of the Cluster has the keys".to_owned()))
}

/// What `INFO` says.
struct Info(String);

impl Info {
    fn fact(&self, name: &str) -> Option<&str> {
        self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    }

    fn check_version(&self) -> Result<(), StoreError> {
        // Valkey says 7.2 here too.
        let version = self.fact("redis_version").unwrap_or("unknown");
        let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
        if major.is_some_and(|major| major >= OLDEST) {
            return Ok(());
        }
        Err(StoreError::Unfit(format!(
            "Redis {OLDEST}.0 or Valkey is needed, this is Redis {version}"
        )))
    }

    fn judge(&self, needs: &Needs) -> Result<Server, StoreError> {
        let unavailable = |why: &str| Err(StoreError::Unavailable(why.to_owned()));
        if self.fact("loading") == Some("1") {
            return unavailable("the server is still loading its data");
        }
        if self.fact("role") != Some("master") {
            return unavailable("the server is a replica");
        }
        let mut remarks = Vec::new();
        let policy = self.fact("maxmemory_policy").unwrap_or("noeviction");
        if policy != "noeviction" {
            let why = format!(
                "maxmemory-policy is {policy}: the server may throw away slots that are held; it should be noeviction"
            );
            if needs.strict {
                return Err(StoreError::Unfit(
                    why + ", and must be where a limit says recovery = \"strict\"",
                ));
            }
            remarks.push(why);
        }
        let replicas = self.fact("connected_slaves").is_some_and(|count| count != "0");
        // Told only where min-replicas-to-write is above 0.
        if needs.strict && replicas && self.fact("min_slaves_good_slaves").is_none() {
            remarks.push(
                "the server has replicas, but min-replicas-to-write is 0: a failover may lose slots \
                 although a limit says recovery = \"strict\""
                    .to_owned(),
            );
        }
        match self.fact("run_id") {
            Some(run) if !run.is_empty() => Ok(Server { run: run.to_owned(), remarks }),
            _ => Err(StoreError::BadReply("INFO tells no run_id".to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FINE: &str = "# Server\r\nredis_version:7.0.15\r\nrun_id:abc\r\nrole:master\r\n\
                        loading:0\r\nmaxmemory_policy:noeviction\r\nconnected_slaves:0\r\n";

    fn judge(change: (&str, &str), strict: bool) -> Result<Server, StoreError> {
        assert!(FINE.contains(change.0));
        let info = Info(FINE.replace(change.0, change.1));
        info.check_version()?;
        info.judge(&Needs { prefix: String::new(), strict })
    }

    #[test]
    fn only_a_loaded_master_of_version_seven_will_do() {
        assert_eq!(judge(("", ""), true).unwrap().run, "abc");
        for (change, why) in [
            (("7.0.15", "6.2.1"), "this is Redis 6.2.1"),
            (("role:master", "role:slave"), "replica"),
            (("loading:0", "loading:1"), "loading"),
        ] {
            let error = judge(change, false).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn a_server_that_may_forget_is_told_of_and_refused_where_it_must_not() {
        let evicts = ("noeviction", "allkeys-lru");
        let remarks = judge(evicts, false).unwrap().remarks;
        assert!(remarks[0].contains("maxmemory-policy is allkeys-lru"), "{remarks:?}");
        assert!(matches!(judge(evicts, true), Err(StoreError::Unfit(_))));

        let replicated = ("connected_slaves:0", "connected_slaves:1");
        let remarks = judge(replicated, true).unwrap().remarks;
        assert!(remarks[0].contains("min-replicas-to-write is 0"), "{remarks:?}");
        let safe = ("connected_slaves:0", "connected_slaves:1\r\nmin_slaves_good_slaves:1");
        for (change, strict) in [(replicated, false), (safe, true), (("", ""), true)] {
            assert!(judge(change, strict).unwrap().remarks.is_empty(), "{change:?}");
        }
    }
}
