//! What looks wrong although it is valid.

use http::HeaderName;

use crate::config::{ClassRule, Config, Limit, Route, Step, StoreKind, WeightRule, WhenDown};

/// Returns one sentence each.
pub(super) fn warnings(config: &Config) -> Vec<String> {
    let mut warnings = Vec::new();
    if config.store.kind == StoreKind::Memory {
        warnings.push(
            "the store is memory: it counts per process; a fleet shares its slots only in Redis"
                .to_owned(),
        );
    }
    if config.store.when_down == WhenDown::Open {
        warnings
            .push("store.when_down is \"open\": no limit holds while the store is away".to_owned());
    }
    for upstream in config.upstreams.iter().filter(|upstream| upstream.tls.insecure) {
        warnings.push(format!(
            "upstream `{}` is insecure: any certificate is accepted, so anyone on the way can be this upstream",
            upstream.name
        ));
    }
    let nobody_is_trusted = config.server.trusted_proxies.is_empty();
    for route in &config.routes {
        if nobody_is_trusted {
            warnings.extend(headers_of(route).map(|(key, header)| {
                format!(
                    "route `{}`: {key} is taken from header {header}, which counts from trusted proxies only, and server.trusted_proxies is empty: it is removed and has no effect",
                    route.name
                )
            }));
        }
        for chain in chains(route, config) {
            outer_larger(route, &chain, &mut warnings);
            keyed_alone(route, &chain, &mut warnings);
            too_heavy(route, &chain, config, &mut warnings);
        }
    }
    warnings.extend(unlimited(config));
    warnings.extend(unused(config));
    warnings
}

/// The keys whose value a trusted hop says in a header.
fn headers_of(route: &Route) -> impl Iterator<Item = (&'static str, &HeaderName)> {
    let class = match &route.class {
        ClassRule::Header { name, .. } => Some(("class", name)),
        ClassRule::Fixed(_) | ClassRule::ByKey { .. } => None,
    };
    let weight = match &route.weight {
        WeightRule::Header { name, .. } => Some(("weight", name)),
        WeightRule::Fixed(_) | WeightRule::Bytes { .. } => None,
    };
    class.into_iter().chain(weight)
}

/// What one request of a route may take together: the route's limits, or those of a step of `on_full`.
fn chains<'a>(route: &Route, config: &'a Config) -> Vec<Vec<&'a Limit>> {
    let steps = targets(route).map(|upstream| &config.upstreams[upstream].limits);
    let chains = std::iter::once(&route.limits).chain(steps);
    chains.map(|chain| chain.iter().map(|&limit| &config.limits[limit]).collect()).collect()
}

/// The upstreams that a route may degrade to.
fn targets(route: &Route) -> impl Iterator<Item = usize> {
    route.on_full.iter().filter_map(|step| match step {
        Step::Upstream { upstream, .. } => Some(*upstream),
        Step::Stale { .. } | Step::Respond { .. } => None,
    })
}

/// An outer limit with more slots than an inner one never fills: its holders queue at the inner one.
fn outer_larger(route: &Route, chain: &[&Limit], warnings: &mut Vec<String>) {
    for (position, outer) in chain.iter().enumerate() {
        for inner in &chain[position + 1..] {
            if outer.slots > inner.slots {
                warnings.push(format!(
                    "route `{}`: outer limit `{}` ({} slots) is larger than inner limit `{}` ({} slots), so it holds slots while it waits there",
                    route.name, outer.name, outer.slots, inner.name, inner.slots
                ));
            }
        }
    }
}

/// Any number of key values together need a limit too.
fn keyed_alone(route: &Route, chain: &[&Limit], warnings: &mut Vec<String>) {
    for (position, keyed) in chain.iter().enumerate() {
        let is_wide = |limit: &&Limit| limit.key.is_none();
        if keyed.key.is_some() && !chain[position + 1..].iter().any(is_wide) {
            warnings.push(format!(
                "route `{}`: keyed limit `{}` has no wide one behind it, so all its values together are without any limit",
                route.name, keyed.name
            ));
        }
    }
}

fn too_heavy(route: &Route, chain: &[&Limit], config: &Config, warnings: &mut Vec<String>) {
    let weight = route.weight.max();
    // While there is no slot at all, nobody is too heavy.
    for limit in chain.iter().filter(|limit| limit.slots > 0) {
        if weight > limit.slots {
            warnings.push(format!(
                "route `{}`: a request may weigh {weight}, more than limit `{}` has slots ({}): it would be refused as too_heavy",
                route.name, limit.name, limit.slots
            ));
            continue;
        }
        for class in classes_of(&route.class, config) {
            let cap = limit.cap(class);
            if weight > cap {
                warnings.push(format!(
                    "route `{}`: a request may weigh {weight}, more than class `{}` may use of limit `{}` ({cap} slots): it would be refused as too_heavy",
                    route.name, config.classes.order[class], limit.name
                ));
            }
        }
    }
}

/// Every class that a request of the route may have.
fn classes_of(rule: &ClassRule, config: &Config) -> Vec<usize> {
    match rule {
        ClassRule::Fixed(class) => vec![*class],
        ClassRule::Header { .. } => (0..config.classes.order.len()).collect(),
        ClassRule::ByKey { classes, default, .. } => {
            let named = classes.iter().map(|(_, class)| *class);
            let mut all: Vec<_> = named.chain([*default]).collect();
            all.sort_unstable();
            all.dedup();
            all
        }
    }
}

fn unlimited(config: &Config) -> impl Iterator<Item = String> {
    let routes = config.routes.iter().filter(|route| route.limits.is_empty());
    routes.map(|route| {
        format!(
            "route `{}`: upstream `{}` is without any limit",
            route.name, config.upstreams[route.upstream].name
        )
    })
}

fn unused(config: &Config) -> Vec<String> {
    let leads_to = |route: &Route, upstream| {
        route.upstream == upstream || targets(route).any(|target| target == upstream)
    };
    let takes = |route: &Route, limit| {
        route.limits.contains(&limit)
            || targets(route).any(|target| config.upstreams[target].limits.contains(&limit))
    };
    let nowhere = |is_used: &dyn Fn(&Route) -> bool| !config.routes.iter().any(is_used);
    let mut unused = Vec::new();
    for (index, limit) in config.limits.iter().enumerate() {
        if nowhere(&|route| takes(route, index)) {
            unused.push(format!("limit `{}` is used by no route", limit.name));
        }
    }
    for (index, rate) in config.rates.iter().enumerate() {
        if nowhere(&|route| route.rates.contains(&index)) {
            unused.push(format!("rate `{}` is used by no route", rate.name));
        }
    }
    for (index, upstream) in config.upstreams.iter().enumerate() {
        if nowhere(&|route| leads_to(route, index)) {
            unused.push(format!("upstream `{}` is used by no route", upstream.name));
        }
    }
    unused
}
